"""The live panel in JupyterLab: it moves while a cell runs, and what its button, its views and a
reload do.
"""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ipygpumem.extras.panel import panel as panel_module
from tests.frontends.conftest import needs
from tests.frontends.lab import DARK, LIGHT, Notebook, Server
from tests.frontends.looks import Pictures, contrasts, misfits
from tests.notebooks import notebook

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Locator, Page

pytestmark = [pytest.mark.frontends, pytest.mark.timeout(600)]

LOAD = "%load_ext ipygpumem"
OPEN = textwrap.dedent(
    """\
    import ipygpumem

    shown = ipygpumem.panel()
    shown"""
)
BUSY = """import pathlib, time

hold = bytearray(300 * 2**20)
globals()["<b>bold</b>"] = bytearray(20 * 2**20)
while not pathlib.Path("go").exists():
    time.sleep(0.1)"""
READS = "feed = shown._feed()\nfeed._tick in feed._app.context.meter.worker._next_times"
WCAG_AA = 4.5
PANEL = ".ipygpumem-panel"


@pytest.fixture
def opened(lab: Notebook) -> Notebook:
    """JupyterLab with an open panel, a cell that runs until the file ``go`` exists,
    and one more.
    """
    needs("anywidget")
    lab.open(notebook(LOAD, OPEN, BUSY, READS, "%unload_ext ipygpumem"))
    lab.run(0, 1)
    lab.page.locator(PANEL).wait_for()
    return lab


def starts(lab: Notebook, cell: int = 2) -> Locator:
    """Run the cell and return the panel once it shows that it runs."""
    lab.enter(cell)
    lab.press()
    panel = lab.page.locator(PANEL)
    panel.get_by_text(re.compile("running for")).first.wait_for()
    return panel


def ends(lab: Notebook, cell: int = 2) -> None:
    (lab._server.folder / "go").touch()
    lab.wait(cell)
    (lab._server.folder / "go").unlink()


def rss_of(panel: Locator) -> float:
    return float(panel.locator(".own .figure").first.inner_text().split()[0])


def test_the_panel_updates_during_a_cell_and_frees_after_it(opened: Notebook) -> None:
    before = rss_of(opened.page.locator(PANEL))
    panel = starts(opened)
    opened.page.wait_for_function(
        f"parseFloat(document.querySelector('.own .figure').innerText) > {before + 290}"
    )
    button = panel.get_by_role("button", name="Free memory")
    assert button.is_disabled()
    assert opened.outputs(2).count() == 0
    ends(opened)
    panel.get_by_text("cell 3 · took").wait_for()
    panel.get_by_text("after cell 3").wait_for()
    assert panel.locator(".name code").all_inner_texts() == ["hold", "<b>bold</b>"]
    button.click()
    panel.get_by_text(re.compile("^freed: RAM")).wait_for()
    assert opened.outputs(2).count() == 1  # the cell's line


def test_the_panel_survives_an_interrupt_and_a_second_view(opened: Notebook) -> None:
    starts(opened)
    opened.command("notebook:interrupt-kernel")
    opened.wait(2)
    assert "KeyboardInterrupt" in opened.cell(2).inner_text()
    opened.page.get_by_text("cell 3 · took").wait_for()

    # A second view of the notebook, which is closed again.
    opened.enter(1)
    opened.command("notebook:create-output-view")
    opened.page.locator(PANEL).nth(1).wait_for()
    opened.page.evaluate("[...jupyterapp.shell.widgets('main')].at(-1).close()")
    opened.page.wait_for_function(f"document.querySelectorAll('{PANEL}').length === 1")
    panel = starts(opened)
    ends(opened)
    panel.get_by_text("cell 4 · took").wait_for()
    opened.run(3)
    assert opened.outputs(3).first.inner_text().endswith("True")

    # The panel goes with its output.
    opened.enter(1)
    opened.command("notebook:clear-cell-output")
    panel.wait_for(state="detached")
    opened.run(3)
    assert opened.outputs(3).first.inner_text().endswith("False")

    # A new one has a button to close it.
    opened.run(1)
    panel.get_by_text("cell 7 · took").wait_for()
    panel.get_by_role("button", name="Close the panel").click()
    panel.wait_for(state="detached")


def test_a_reloaded_page_shows_the_history_until_unloading(opened: Notebook) -> None:
    starts(opened)
    ends(opened)
    opened.page.get_by_text("after cell 3").wait_for()
    with opened.page.expect_response(
        lambda reply: reply.request.method == "PUT" and "/api/contents/" in reply.url
    ):
        opened.command("docmanager:save")
    opened.reload()
    opened.page.get_by_text("after cell 3").wait_for()
    band = opened.page.locator(f"{PANEL} path.cells")
    opened.page.wait_for_function(
        "path => path.getAttribute('d') !== ''", arg=band.element_handle()
    )
    opened.run(4)
    opened.page.locator(PANEL).wait_for(state="detached")


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_the_panel_is_legible_and_fits_narrow_pages(opened: Notebook, theme: str) -> None:
    opened.command("application:toggle-left-area")
    starts(opened)
    ends(opened)
    opened.page.get_by_text("after cell 3").wait_for()
    opened.theme(theme)
    panel = opened.page.locator(PANEL)
    assert [text for text in contrasts(panel.locator(".grid")) if text["contrast"] < WCAG_AA] == []
    for width in (900, 520, 380, 330):
        opened.resize(width, 900)
        assert misfits(panel) == []


def test_the_panel_works_in_notebook_7(browser: BrowserContext, tmp_path: Path) -> None:
    needs("anywidget", "notebook")
    server = Server(tmp_path, "notebook")
    page = Notebook(server, browser)
    try:
        page.open(notebook(LOAD, OPEN, BUSY))

        # It shows a cell while it runs and afterwards.
        page.run(0, 1)
        page.complaints.clear()  # Notebook 7.6 stumbles over its own settings while it starts
        panel = starts(page)
        ends(page)
        panel.get_by_text("after cell 3").wait_for()

        # Its button frees memory.
        panel.get_by_role("button", name="Free memory").click()
        panel.get_by_text(re.compile("^freed: RAM")).wait_for()
        assert page.complaints == []
    finally:
        page.close()
        server.close()


_ROW = {
    "RAM": {"own": 2**30, "total": 2**34},
    "cuda:0": {"allocated": 2**31, "reserved": 2**32, "used": 2**33, "total": 2**34, "load": 40},
}
_PAGE = """<style>body {{ margin: 8px }} {css}</style><div id="el"></div>
<script type="module">
{script}
const now = Date.now() / 1000;
const rows = Array.from({{ length: 60 }}, (_, index) => (
  {{ time: now - 60 + index, cell: 3, devices: {devices} }}
));
const names = [{{ name: "hold", size: 2 ** 28, at_least: false, devices: "RAM" }}];
const state = {{ time: now, seconds: 2, cell: 3, message: "", largest: {{ cell: 3, names }} }};
window.sent = [];
const send = (message) => window.sent.push(message);
const model = {{ get: () => ({{ rows, state }}), on: () => 0, send }};
const widget = make_widget();
widget.initialize({{ model }});
widget.render({{ model, el: document.getElementById("el") }});
</script>"""


@pytest.fixture
def alone(browser: BrowserContext) -> Iterator[Page]:
    """A page with only a panel of two devices, whose model has no kernel."""
    folder = Path(panel_module.__file__).parent
    script = (folder / "panel.js").read_text("utf-8")
    content = _PAGE.format(
        css=(folder / "panel.css").read_text("utf-8"),
        script=script.replace("export default", "const make_widget ="),
        devices=json.dumps(_ROW),
    )
    page = browser.new_page()
    page.set_content(content)
    page.locator(PANEL).wait_for()
    yield page
    page.close()


def test_the_panel_names_its_parts_for_screen_readers(alone: Page) -> None:
    panel = alone.get_by_role("region", name="live memory")
    assert panel.get_by_role("region", name="memory of RAM").count() == 1
    assert panel.get_by_role("listitem").all_inner_texts()[0].startswith("hold")
    text = panel.get_by_role("slider").nth(1).get_attribute("aria-valuetext")
    assert text == (
        "now: allocated 2.00 GiB, reserved 4.00 GiB, used by all 8.00 GiB, 50 % of 16.00 GiB"
    )
    labels = [text.split("\n")[0] for text in panel.locator(".key").all_inner_texts()]
    assert labels[0] == "RAM"


def test_the_panel_works_by_keyboard(alone: Page) -> None:
    names = []
    for _ in range(4):
        alone.keyboard.press("Tab")
        names.append(alone.evaluate("document.activeElement.getAttribute('aria-label') ?? ''"))
    assert [name.partition(":")[0] for name in names] == ["", "Close the panel", "RAM", "cuda"]

    # Keys move the slider over the curve.
    alone.keyboard.press("ArrowLeft")
    alone.keyboard.press("PageUp")
    alone.get_by_text("11.0 s ago · cell 3").wait_for()
    slider = alone.get_by_role("slider").nth(1)
    assert (slider.get_attribute("aria-valuenow"), slider.get_attribute("aria-valuemin")) == (
        "-11",
        "-60",
    )

    # Escape goes back to the present.
    alone.keyboard.press("Escape")
    alone.get_by_text("cell 3 · took").wait_for()

    # Enter presses the button.
    alone.locator("button").first.focus()
    alone.keyboard.press("Enter")
    assert alone.evaluate("window.sent.at(-1).kind") == "free"


@pytest.mark.parametrize(("width", "columns"), [(900, 2), (600, 2), (330, 1)])
def test_devices_fill_the_width_next_to_each_other(alone: Page, width: int, columns: int) -> None:
    alone.set_viewport_size({"width": width, "height": 700})
    charts = [chart.bounding_box() for chart in alone.locator(".curves").all()]
    assert len({chart["y"] for chart in charts if chart}) == 3 - columns
    # The charts take the panel's width, and are high enough to be read.
    assert sum(chart["width"] for chart in charts if chart) > 0.85 * width
    assert min(chart["height"] for chart in charts if chart) >= 110
    assert misfits(alone.locator(PANEL)) == []


TRAINING = (
    LOAD,
    "import ipygpumem\n\nipygpumem.panel()",
    """import torch
from torch import nn

model = nn.Sequential(*[nn.Linear(4096, 4096, device="cuda") for _ in range(24)])
optimizer = torch.optim.AdamW(model.parameters())
images = torch.rand(8192, 4096)
model(images[:512].cuda()).sum().backward()
optimizer.step()""",
    """import pathlib, time

for step in range(1000):
    batch = images.cuda()
    loss = model(batch).sum()
    time.sleep(0.8)
    loss.backward()
    time.sleep(0.8)
    optimizer.step()
    del loss
    if pathlib.Path("go").exists():
        break""",
)
SIMULATED = Path(__file__).parents[2] / "build/simgpu/python"


@pytest.fixture
def simulated(browser: BrowserContext, tmp_path: Path) -> Iterator[Notebook]:
    """JupyterLab whose kernel has a simulated card, and the widget libraries of this
    environment.
    """
    needs("anywidget", "jupyterlab")
    if not SIMULATED.exists():
        pytest.skip("no simulated card here: `make build/simgpu/.built` makes it")
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    for name in ("anywidget", "ipywidgets", "psygnal", "widgetsnbextension", "jupyterlab_widgets"):
        simulator = distribution(name)
        for top in {file.parts[0] for file in simulator.files or () if ".." not in file.parts}:
            (libraries / top).symlink_to(Path(str(simulator.locate_file(top))))
    server = Server(tmp_path)
    spec = {
        "argv": [str(SIMULATED), "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
        "env": {
            "PYTHONPATH": os.pathsep.join([str(libraries), str(Path(__file__).parents[2])]),
            "SIM_TABLE": str(tmp_path / "machine"),
        },
    }
    folder = tmp_path / "data/kernels/python3"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps(spec))
    page = Notebook(server, browser, width=900, height=1100)
    yield page
    page.close()
    server.close()


def test_the_panel_shows_a_card_during_training_in_both_themes(
    simulated: Notebook, pictures: Pictures
) -> None:
    simulated.open(notebook(*TRAINING), "training.ipynb")
    simulated.command("application:toggle-left-area")
    simulated.run(0, 1, 2, seconds=200)
    panel = starts(simulated, 3)
    panel.get_by_text("after cell 3").wait_for()
    assert panel.locator(".key").all_inner_texts()[1:] != []

    # Both themes have a picture.
    for _ in range(16):
        simulated.page.wait_for_timeout(1000)  # the picture needs a curve
    for theme, name in ((LIGHT, "panel"), (DARK, "panel-dark")):
        simulated.theme(theme)
        pictures.take(panel, name)

    # The card has all its curves.
    labels = [text.split("\n")[0] for text in panel.locator(".key").all_inner_texts()]
    assert labels == ["RAM", "allocated", "reserved", "used by all"]
    (simulated._server.folder / "go").touch()
    simulated.wait(3)
