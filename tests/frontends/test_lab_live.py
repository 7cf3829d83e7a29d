"""The live line in JupyterLab leaves the user's output as it would be without it: on the screen, and in the file."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.frontends.lab import UNTIL, Notebook
from tests.notebooks import notebook, read
from tests.waiting import tick_often

pytestmark = pytest.mark.frontends

LOAD = f"{inspect.getsource(tick_often)}\ntick_often()\n%load_ext ipygpumem"
PAUSE = """
import sys, time
from IPython.display import clear_output, display
from tqdm import tqdm
def pause():
    "Wait until the live line has been drawn twice, if it is; without the extension go on at once."
    if 'ipygpumem' in sys.modules:
        from ipygpumem.notebook.notebook import current_notebook
        heard = []
        undo = current_notebook().tools.ticker.listen(heard.append)
        while len(heard) < 2:
            time.sleep(0.01)
        undo()
"""
LINE = re.compile(r"RAM [\d.]+ [MG]iB / [\d.]+ [GT]iB")

CELLS = {
    "a bar of tqdm's": """
for step in tqdm(range(5), bar_format='{percentage:3.0f}%|{bar:20}| {n}/{total}', mininterval=0):
    if step == 2: pause()""",
    "two bars of tqdm's, one in the other": """
for epoch in tqdm(range(2), bar_format='{n}/{total}', mininterval=0, position=0):
    for step in tqdm(range(3), bar_format='{n}/{total}', mininterval=0, position=1, leave=False):
        if step == 1 and not epoch: pause()""",
    "a line that is finished later": "print('loss: ', end='', flush=True); pause(); print('0.5')",
    "a row of dots": """
for step in range(6):
    print('.', end='', flush=True)
    if step == 3: pause()
print()""",
    "steps, each a line": """
for step in range(4):
    print('step', step, flush=True)
    if step in (1, 2): pause()""",
    "a bar of backspaces": """
for step in range(1, 4):
    text = f'{step}/3 [{"=" * step:3}]'
    sys.stdout.write('\\b' * len(text) + text); sys.stdout.flush()
    if step == 2: pause()
print()""",
    "codes that move the cursor": r"""
for step in range(3):
    print('\x1b[1A\x1b[2K' * bool(step) + f'step {step}', flush=True)
    if step == 1: pause()""",
    "stdout and stderr in turns": """
for step in range(3):
    print('out', step, end=' ', flush=True); print('err', step, file=sys.stderr, end=' ', flush=True)
    if step == 1: pause()""",
    "silence, then a print": "pause(); print('late')",
    "silence, a print, silence": "pause(); print('first'); pause(); print('second')",
    "silence, then a result": "pause(); 6 * 7",
    "silence, then an error": "pause(); 1 / 0",
    "silence, then a display": "pause(); display('shown')",
    "a display that is updated": "handle = display('old', display_id=True); pause(); handle.update('new'); pause()",
    "output that is cleared": "print('old'); pause(); clear_output(wait=True); pause(); print('new')",
    "silence, then output that is cleared": "pause(); clear_output(); print('new')",
    "a child process": "!echo one; printf two\npause()\n!echo three",
    "a thread": """
import threading
def talk():
    print('from', end=' ', flush=True); pause(); print('a thread')
thread = threading.Thread(target=talk); thread.start(); thread.join()""",
    "silence": "pause()",
}


VALIDATE = "import nbformat, sys; nbformat.validate(nbformat.read(sys.argv[1], as_version=4))"


def outputs(lab: Notebook, *, first: str) -> list[list[Any]]:
    """Run the cells in a notebook that begins with ``first``; return the outputs of each as they are saved."""
    name = f"{'with' if LOAD in first else 'without'}.ipynb"
    content = notebook(first, *CELLS.values())
    for cell in content.cells:
        cell.metadata.tags = ["raises-exception"]  # the next one runs all the same
    lab.open(content, name)
    lab.command("notebook:run-all-cells")
    lab.wait(len(CELLS), seconds=200)
    shown = [text for index in range(len(CELLS) + 1) for text in lab.reports(index).all_inner_texts()]
    assert not any(map(LINE.search, shown)), "a live line is left on the screen"
    with lab.page.expect_response(lambda reply: reply.request.method == "PUT" and "/api/contents/" in reply.url):
        lab.command("docmanager:save")
    path = lab._server.folder / name
    subprocess.run([sys.executable, "-c", VALIDATE, path], check=True)
    saved = read(path)
    return [cell.outputs for cell in saved.cells[1 : len(CELLS) + 1]]


def without_counts(cell: list[Any]) -> list[Any]:
    found = [{key: value for key, value in output.items() if key != "execution_count"} for output in cell]
    # An error's frames have the cell's number, too.
    return [{**item, "traceback": len(item["traceback"])} if "traceback" in item else item for item in found]


def test_a_notebook_is_saved_with_exactly_the_outputs_that_it_has_without_the_extension(lab: Notebook) -> None:
    expected = outputs(lab, first=PAUSE)
    found = outputs(lab, first=LOAD + PAUSE)
    differ = {}
    for name, plain, cell in zip(CELLS, expected, found, strict=True):
        *users, report = cell
        assert report["metadata"] == {"ipygpumem": {"reports": ["cell"]}}, name
        assert report["data"]["text/plain"].startswith("cell "), name
        if without_counts(users) != without_counts(plain):
            differ[name] = users, plain
    assert differ == {}


SLOW = """
from ipygpumem.notebook.commands import tensors
real = tensors.survey.take
def slow(*arguments, progress, **options):
    progress(0.4)
    import time
    from pathlib import Path
    while not Path("seen work").exists(): time.sleep(0.02)
    return real(*arguments, progress=progress, **options)
tensors.survey.take = slow
"""


def test_our_own_long_work_is_one_line_with_its_share(lab: Notebook, tmp_path: Path) -> None:
    lab.open(notebook(LOAD + SLOW, "%gpumem tensors"))
    lab.run(0)
    lab.enter(1)
    lab.press()
    lab.reports(1).get_by_text("ipygpumem: tensors and arrays 40%").wait_for()
    assert lab.reports(1).count() == 1
    lab.cell(1).screenshot(path=tmp_path / "work.png")
    lab.let("seen work")
    lab.wait(1)
    assert lab.reports(1).get_by_text("ipygpumem: tensors and arrays").count() == 0
    assert lab.outputs(1).count() == 2


def test_a_question_and_its_answer_stand_alone(lab: Notebook) -> None:
    lab.open(notebook(LOAD + PAUSE, UNTIL.format("seen a line") + "name = input('who? '); pause()"))
    lab.run(0)
    lab.enter(1)
    lab.press()
    lab.reports(1).get_by_text(LINE).wait_for()
    lab.let("seen a line")
    box = lab.cell(1).locator(".jp-Stdin-input")
    box.wait_for()
    lab.reports(1).wait_for(state="detached")
    box.fill("nobody")
    box.press("Enter")
    lab.wait(1)
    assert lab.outputs(1).first.inner_text().split() == ["who?", "nobody"]
    assert lab.outputs(1).count() == 2
    assert lab.reports(1).count() == 1
