"""The live line of a terminal: the lowest row, while all that the user's code prints scrolls above it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyte")
if sys.platform == "win32":
    pytest.skip("no pty on this system", allow_module_level=True)

from tests.terminal import Terminal  # only where there is a pty

LIVE = re.compile(r"\d+ s · RAM [\d.]+ MiB / [\d.]+ [GT]iB")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path)
    terminal.run(f"import time, os, sys; from tests.waiting import until, ticks; os.chdir({str(tmp_path)!r})")
    yield terminal
    terminal.close()


def is_shown(terminal: Terminal) -> bool:
    return LIVE.match(terminal.rows[-1]) is not None


def let(tmp_path: Path, name: str) -> None:
    """Let the cell go on that waits ``until(name)``."""
    (tmp_path / name).touch()


def no_line_is_left(terminal: Terminal) -> bool:
    return not any(LIVE.match(row) for row in terminal.everything) and terminal.screen.margins is None


def test_a_long_cell_has_a_line_in_the_lowest_row_that_is_gone_at_its_end(terminal: Terminal, tmp_path: Path) -> None:
    terminal.type("until('seen'); print('done')")
    terminal.watch(lambda: is_shown(terminal))
    first = terminal.rows[-1]
    terminal.watch(lambda: is_shown(terminal) and terminal.rows[-1] != first)
    let(tmp_path, "seen")
    terminal._await_prompt()
    assert no_line_is_left(terminal)
    assert "done" in terminal.rows
    assert any(row.startswith("cell 3 · ") for row in terminal.rows)


def test_output_scrolls_above_the_line_and_nothing_of_it_is_lost(terminal: Terminal, tmp_path: Path) -> None:
    terminal.type("for i in range(120): print(f'row {i}'); i not in (30, 90) or until(f'seen {i}')")
    for row in (30, 90):
        terminal.watch(lambda row=row: is_shown(terminal) and f"row {row}" in terminal.everything)  # type: ignore[misc]  # bound at once
        let(tmp_path, f"seen {row}")
    terminal._await_prompt()
    printed = [row for row in terminal.everything if row.startswith("row ")]
    assert printed == [f"row {i}" for i in range(120)]
    assert no_line_is_left(terminal)


def test_a_line_that_is_half_printed_goes_on_in_its_column(terminal: Terminal, tmp_path: Path) -> None:
    for _ in range(12):
        terminal.run("1")  # the cursor is in the lowest row by now
    terminal.type("print('one ', end='', flush=True); until('seen'); print('two', end='', flush=True)")
    terminal.watch(lambda: is_shown(terminal))
    let(tmp_path, "seen")
    terminal._await_prompt()
    assert any(row.startswith("one two") for row in terminal.rows)
    assert no_line_is_left(terminal)


def test_output_of_c_code_and_child_processes_is_not_written_over(terminal: Terminal, tmp_path: Path) -> None:
    child = "echo from a child; until test -e late; do sleep 0.02; done; echo late"
    terminal.type(f"ticks(2); os.write(1, b'from C\\n'); os.system({child!r})")
    terminal.watch(lambda: is_shown(terminal) and "from C" in terminal.rows)
    let(tmp_path, "late")
    terminal._await_prompt()
    assert {"from C", "from a child", "late"} <= set(terminal.rows)
    assert no_line_is_left(terminal)


def test_the_line_moves_with_the_lowest_row_of_a_window_that_changes_its_size(
    terminal: Terminal, tmp_path: Path
) -> None:
    terminal.type("until('seen'); print('still here')")
    terminal.watch(lambda: is_shown(terminal))
    terminal.resize(30, 90)
    terminal.watch(lambda: is_shown(terminal) and terminal.screen.margins.bottom == 28)
    terminal.resize(20, 90)
    terminal.watch(lambda: is_shown(terminal) and terminal.screen.margins.bottom == 18)
    let(tmp_path, "seen")
    terminal._await_prompt()
    assert "still here" in terminal.rows
    assert terminal.screen.margins is None


def test_ctrl_c_stops_the_users_code_and_takes_the_line_away(terminal: Terminal) -> None:
    terminal.type("time.sleep(60)")
    terminal.watch(lambda: is_shown(terminal))
    terminal.press(b"\x03")
    terminal._await_prompt()
    assert any("KeyboardInterrupt" in row for row in terminal.rows)
    assert no_line_is_left(terminal)


def test_a_program_that_takes_the_terminal_over_is_not_drawn_upon(terminal: Terminal, tmp_path: Path) -> None:
    terminal.run("import tty, termios; mode = termios.tcgetattr(0)")
    terminal.type("tty.setraw(0); ticks(3); print('was', 'raw'); termios.tcsetattr(0, 0, mode); until('seen')")
    shown = []
    terminal.watch(lambda: shown.append(is_shown(terminal)) or any("was raw" in row for row in terminal.rows))
    assert not any(shown[:-1])
    terminal.watch(lambda: is_shown(terminal))
    let(tmp_path, "seen")
    terminal._await_prompt()
    assert no_line_is_left(terminal)


@pytest.mark.parametrize(
    "setting", ["%config IPyGpuMem.live = False", "%gpumem off", "sys.stdout = open('/dev/null', 'w')"]
)
def test_the_line_is_off_where_it_is_not_wanted(terminal: Terminal, setting: str) -> None:
    terminal.run(setting)
    before = len(terminal.raw)
    terminal.run("time.sleep(1.8)")
    assert b"\x1b7" not in terminal.raw[before:]
    assert terminal.screen.margins is None


def test_a_dumb_terminal_gets_no_control_sequence(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, env={"TERM": "dumb"})
    before = len(terminal.raw)
    terminal.run("import time; time.sleep(1.8)")
    assert b"\x1b7" not in terminal.raw[before:]
    terminal.close()


def test_a_pipe_gets_no_line(tmp_path: Path) -> None:
    code = "get_ipython().run_cell('%load_ext ipygpumem'); get_ipython().run_cell('import time; time.sleep(1.8)')"
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--quick", "-c", code],
        capture_output=True,
        check=True,
        timeout=60,
        env={**os.environ, "IPYTHONDIR": str(tmp_path), "TERM": "xterm"},
    )
    assert b"\x1b7" not in done.stdout
    assert re.search(rb"cell .* \d\.\d+ s", done.stdout)
