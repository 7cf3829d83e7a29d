"""The panel in the library that shows widgets outside of Jupyter, without a kernel."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.harness.kernel import Kernel
from tests.frontends.conftest import needs
from tests.frontends.pages import PACKAGES, Pages, needs_package

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

pytestmark = [pytest.mark.frontends, pytest.mark.timeout(600)]

STATE = """
import json
from ipywidgets.embed import embed_data

print(json.dumps(embed_data(views=[shown._feed().widget], drop_defaults=False)))
"""
PAGE = """<!doctype html>
<link rel="icon" href="data:">
<script src="/static/requirejs/require.js"></script>
<script>requirejs.config({paths: {anywidget: "/anywidget"}})</script>
<script src="/static/@jupyter-widgets/html-manager/dist/embed-amd.js"></script>
<script type="application/vnd.jupyter.widget-state+json">STATE</script>
<body>
<script type="application/vnd.jupyter.widget-view+json">VIEW</script>
"""


@pytest.fixture
def pages() -> Iterator[Pages]:
    """Serve a page with the panel of a kernel that has ended."""
    needs("anywidget", "ipywidgets")
    needs_package("@jupyter-widgets/html-manager")
    needs_package("requirejs")
    import anywidget  # only the tests in a browser have it

    with Kernel() as kernel:
        kernel.run("%load_ext ipygpumem")
        kernel.run("import ipygpumem; shown = ipygpumem.panel()")
        made = json.loads(kernel.run(STATE).stdout)
    state, view = (
        json.dumps(part).replace("<", "\\u003c")
        for part in (made["manager_state"], made["view_specs"][0])
    )
    script = Path(anywidget.__file__).parent / "nbextension/index.js"
    pages = Pages(PACKAGES)
    pages.by_address |= {
        "/": ("text/html", PAGE.replace("STATE", state).replace("VIEW", view)),
        "/anywidget.js": ("text/javascript", script.read_text("utf-8")),
    }
    yield pages
    pages.close()


def test_the_panel_is_drawn_outside_of_jupyter(pages: Pages, browser: BrowserContext) -> None:
    page = browser.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(f"exception: {error}"))
    page.on("requestfailed", lambda request: complaints.append(f"network: {request.url}"))
    page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
    page.goto(f"http://127.0.0.1:{pages.port}/")
    panel = page.locator(".ipygpumem-panel")
    panel.wait_for()
    assert panel.get_by_role("button", name="Free memory").count() == 1
    assert panel.locator(".own .figure").first.inner_text().endswith("MiB")
    assert panel.locator(".line.own").first.get_attribute("d")
    page.close()
    assert complaints == []
