"""Progress bars, where a report stands among a cell's outputs, and what a terminal
can show of it.
"""

import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.report import text
from ipygpumem.report.cells import cell_report
from ipygpumem.shell import display
from ipygpumem.shell.display import Display, wants_colour
from tests.report_samples import cell
from tests.steps import kernel_with

LOAD = """
import sys, threading, time, ipygpumem
import ipygpumem.shell.display
from ipygpumem.shell import notebook_inventory
real = notebook_inventory.survey.take_inventory
def slow(*arguments, **options):
    options["progress"](0.25)
    return real(*arguments, **options)
notebook_inventory.survey.take_inventory = slow
ipygpumem.shell.display._WORK_SECONDS = 0.0
"""
notebook = kernel_with(f"%load_ext ipygpumem\n{LOAD}")
BAR = "ipygpumem: tensors and arrays 25%"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(
    monkeypatch: pytest.MonkeyPatch, *shares: float, seconds: float = 0.0, report: bool = True
) -> str:
    """Return the text that a terminal gets of work that reports ``shares``."""
    stream = Terminal()
    config = SimpleNamespace(report=report)
    monkeypatch.setattr(display, "_WORK_SECONDS", seconds)
    monkeypatch.setattr(sys, "stderr", stream)
    with Display(SimpleNamespace(), config).working("leaks") as progress:
        for share in shares:
            progress(share)
    return stream.getvalue()


def test_a_terminals_bar_never_moves_back_and_is_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = work(monkeypatch, 0.5, 0.25)
    assert "ipygpumem: leaks 50%" in shown
    assert "25%" not in shown
    assert shown.split("\r")[-2].strip() == ""


def test_a_bar_is_full_when_it_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise tqdm's widget takes the work for failed, and stays."""
    bars: list[Any] = []
    new = display._new_bar

    def note_bar(*given: Any) -> Any:
        bars.append(new(*given))
        return bars[-1]

    monkeypatch.setattr(display, "_new_bar", note_bar)
    work(monkeypatch, 0.5)
    assert [bar.n for bar in bars] == [1.0]


def test_work_continues_if_the_bar_fails_which_is_reported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    assert work(monkeypatch, 0.5, 0.6).count("the progress bar") == 1


@pytest.mark.parametrize("options", [{"seconds": 600.0}, {"report": False}])
def test_short_work_shows_no_bar_nor_does_gpumem_off(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)  # it is not even imported
    assert work(monkeypatch, 0.5, **options) == ""


def test_a_notebook_shows_a_bar_and_then_the_report(notebook: Kernel) -> None:
    reply = notebook.run("%gpumem tensors", allow_stdin=True)
    assert (BAR in reply.stdout, reply.stderr) == (True, "")
    assert len(reply.reports("tensors")) == 1


@pytest.mark.parametrize(("code", "options"), [("%%capture\n", {}), ("", {"allow_stdin": False})])
def test_captured_output_and_programs_get_no_bar(
    notebook: Kernel, code: str, options: dict[str, bool]
) -> None:
    reply = notebook.run(f"{code}%gpumem tensors", **options)
    assert reply.stdout + reply.stderr == ""


PASSES_ON = """
class PassesOn:
    def __init__(self, stream): self.stream, self.text = stream, ''
    def __getattr__(self, name): return getattr(self.stream, name)
    def write(self, text): self.text += text; return len(text)
    def flush(self): self.stream.write(self.text); self.text = ''; self.stream.flush()
kernels = sys.stdout
sys.stdout = PassesOn(kernels)
"""


def test_the_report_follows_text_buffered_in_a_users_stream(notebook: Kernel) -> None:
    notebook.run(PASSES_ON)
    reply = notebook.run("print('held')")
    notebook.run("sys.stdout = kernels")
    assert (reply.kinds, reply.stdout) == (["stdout", "display"], "held\n")


def test_the_report_comes_after_text_that_is_just_being_sent(notebook: Kernel) -> None:
    notebook.run(
        """
        buffers, flushes = sys.stdout._flush_buffers, threading.Event()
        def slowly():  # as very large text is made a message of
            for item in buffers():
                flushes.set(); time.sleep(1); yield item
        sys.stdout._flush_buffers = slowly
        """
    )
    reply = notebook.run("print('large'); _ = flushes.wait()")
    notebook.run("del sys.stdout._flush_buffers")
    assert (reply.kinds, reply.stdout) == (["stdout", "display"], "large\n")


@pytest.mark.parametrize(
    ("code", "kinds"), [("1", ["result", "display"]), ("1 / 0", ["error", "display"])]
)
def test_a_ctrl_c_during_the_report_is_mentioned_in_it(
    notebook: Kernel, code: str, kinds: list[str]
) -> None:
    notebook.run(
        """
        import signal
        struck = []
        def strike(message):
            if not struck:
                struck.append(True); signal.raise_signal(signal.SIGINT); sum(range(3))
            return message
        """
    )
    reply = notebook.run(f"get_ipython().display_pub.register_hook(strike); {code}")
    assert notebook.run("get_ipython().display_pub.unregister_hook(strike)").result == "True"
    assert (reply.status, reply.kinds) == ("error", kinds)
    assert reply.reports() == reply.reports("cell")
    assert len(reply.reports()) == 1
    assert "Error in callback" not in reply.stdout


REPORT = cell_report(cell())


class Stream(io.StringIO):
    """A standard output with a terminal behind it, or without one."""

    def __init__(self, *, terminal: bool = True, encoding: str = "utf-8") -> None:
        super().__init__()
        self._terminal = terminal
        self._encoding = encoding

    @property
    def encoding(self) -> str:
        return self._encoding

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "140")


def printed(monkeypatch: pytest.MonkeyPatch, stream: Stream, *, bar: bool = True) -> str:
    """Text that a terminal shell prints for the line after a cell."""

    def publish(data: dict[str, Any], metadata: dict[str, Any]) -> None:
        assert list(data) == ["text/plain"]
        print(data["text/plain"])

    shell = SimpleNamespace(display_pub=SimpleNamespace(publish=publish), colors="neutral")
    monkeypatch.setattr(sys, "stdout", stream)
    Display(shell, SimpleNamespace(bar=bar)).show([REPORT])
    return stream.getvalue().rstrip("\n")


def test_a_terminal_gets_colour_and_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    styled = text.render([REPORT], text.Style(width=140, colour=True, bars=True))
    assert printed(monkeypatch, Stream()) == styled
    assert printed(monkeypatch, Stream(terminal=False)) == REPORT.headline
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed(monkeypatch, Stream(), bar=False) == REPORT.headline
    monkeypatch.setenv("COLUMNS", "80")
    assert [len(line) for line in printed(monkeypatch, Stream()).splitlines()] == [72, 62]


NONE = {"NO_COLOR": "1"}
FORCED = {"FORCE_COLOR": "1"}
SHOWN = [
    ({}, True, True),
    ({}, False, False),
    (NONE, True, False),
    (FORCED, False, True),
    (FORCED | NONE, True, False),
]


@pytest.mark.parametrize(("variables", "terminal", "colour"), SHOWN)
def test_colour_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], terminal: bool, colour: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert wants_colour(Stream(terminal=terminal), SimpleNamespace(colors="Neutral")) is colour
    assert not wants_colour(Stream(terminal=terminal), SimpleNamespace(colors="NoColor"))
