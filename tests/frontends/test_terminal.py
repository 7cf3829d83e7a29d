"""A session in a terminal: what stands on its screen from loading to leaving."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyte")
if sys.platform == "win32":
    pytest.skip("no pty on this system", allow_module_level=True)


from tests.terminal import Terminal  # only where there is a pty

SIZE = r"\+64(\.\d)? MiB"  # the terminal's own threads may take a page or two meanwhile
LINE = re.compile(rf"cell \d+ · [\d.]+ m?s · RAM {SIZE}, peak {SIZE}, [\d.]+ MiB now ▕▒+█+ *▏")
EXPERIMENT = "%experiment start trial", "part = bytearray(2**25)", "%experiment end"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path_factory.mktemp("wide"), rows=40, columns=120)
    yield terminal
    terminal.close()


def test_a_cells_line_and_an_experiments_report_fit_the_screen(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, rows=40, columns=80)
    terminal.run("block = bytearray(2**26)")
    assert len([row for row in terminal.rows if LINE.fullmatch(row)]) == 1, terminal.rows
    for cell in EXPERIMENT:
        terminal.run(cell)
    (head,) = [at for at, row in enumerate(terminal.rows) if row.startswith("experiment trial · ")]
    titles, _, figures, deleted = terminal.rows[head + 1 : head + 5]
    assert titles.split()[:4] == ["device", "consumed", "freed", "peak"]
    assert re.fullmatch(
        r" *RAM +\+3[12](\.\d)? MiB +3[1-4](\.\d)? MiB +\+3[12](\.\d)? MiB   ▕[█▒░ ]{8}▏", figures
    )
    assert deleted.strip() == "deleted: part"
    terminal.close()


def rows_before_the_report(terminal: Terminal) -> list[str]:
    """Return the text above the last report that begins a row, down from the prompt."""
    last = max(at for at, row in enumerate(terminal.rows) if re.match(r"cell \d+ · ", row))
    prompt = max(at for at, row in enumerate(terminal.rows[:last]) if row.startswith("In ["))
    return terminal.rows[prompt + 1 : last]


PRINTING = {
    "print('x', end='')": ["x"],
    "import sys; sys.stderr.write('x');": ["x"],
    "import os; os.write(1, b'x');": ["x"],
    "print('40%' * 39, end='\\r')": [],  # is the terminal's to write over, which is done whole
    "print('x' * 120, end='')": ["x" * 120],
    "print('x' * 121, end='')": ["x" * 120, "x"],
    "print('\u5b57' * 59 + 'ab', end='')": ["\u5b57" * 59 + "ab"],
    "pass": [],
}


def test_a_report_begins_on_its_own_row_without_an_empty_row(wide: Terminal) -> None:
    for _ in range(2):  # in the middle of the screen, then in its lowest rows
        for code, printed in PRINTING.items():
            wide.run(code)
            assert [row.replace(" ", "") for row in rows_before_the_report(wide)] == printed, code
        while wide.screen.cursor.y < 38:
            wide.run("pass")


def test_text_that_is_not_for_the_terminal_gets_no_blanks(wide: Terminal, tmp_path: Path) -> None:
    log = tmp_path / "log"
    wide.run(f"import sys; usual, sys.stdout = sys.stdout, open({str(log)!r}, 'w')")
    wide.run("print('x', end='')")
    wide.run("sys.stdout.close(); sys.stdout = usual")
    assert re.search(r"cell \d+ · RAM", log.read_text())
    assert not re.search(" {20}", log.read_text())
