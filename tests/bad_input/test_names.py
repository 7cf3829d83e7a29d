"""Names with markup and control characters in them, and names that are ours or IPython's."""

from __future__ import annotations

import pytest

from tests.kernel import Kernel, Reply
from tests.steps import goes_on, names, run, works

NASTY = "<script>alert(1)</script><b>&amp;\x1b[31mred\x07 {x} $y {{jinja}} %s %(a)s \u202e\ud7ff na\u00efve"


def _is_harmless(reply: Reply) -> None:
    for display in reply.displays:
        html, text = display["data"].get("text/html", ""), display["data"]["text/plain"]
        assert "<script" not in html
        assert "<b>" not in html
        for letter in ("\x1b", "\x07", "\u202e"):
            assert letter not in html + text


def test_names_made_of_nasty_text_are_escaped_wherever_a_report_lists_them(notebook: Kernel) -> None:
    works(notebook, "import numpy as np\nleak = []")
    reply = works(
        notebook,
        "%%experiment a\n"
        f"nasty = {NASTY!r}\n"
        "globals()[nasty] = np.ones(1 << 20)\n"
        "leak.append(globals()[nasty])\n"
        "Odd = type(nasty.replace('\\ud7ff', ''), (np.ndarray,), {})\n"
        "odd = np.ones(1 << 20).view(Odd)\n"
        "leak.append(odd)\n"
        "globals()[''] = 0; globals()[5] = 'not a string'; globals()[('t', 1)] = 2",
    )
    _is_harmless(reply)
    (text,) = reply.reports("experiment")
    assert "still alive" in text
    assert "alert(1)" in text
    assert notebook.value("[n for n in globals() if 'script' in str(n) or n == '']") == []
    works(notebook, "del globals()[5], globals()[('t', 1)]")
    failed = run(
        notebook,
        f"nasty = {NASTY!r}\n"
        "code = compile('def f():\\n    t = np.ones(1 << 20)\\n    raise MemoryError(nasty)', '<s>', 'exec')\n"
        "exec(code)\nf.__code__ = f.__code__.replace(co_name=nasty, co_varnames=(nasty,))\nf()",
    )
    assert failed.error == "MemoryError"
    _is_harmless(failed)
    assert "alert(1)" in failed.reports("recovery")[0]
    goes_on(notebook)


def test_a_wrong_line_with_control_characters_does_not_write_over_the_terminal(notebook: Kernel) -> None:
    for line in ("%experiment end \x1b[31mred", "%experiment start a --\x1b[31mred", "%experiment \x1b[31mred"):
        assert "\x1b[31mred" not in notebook.run(line).stderr
    goes_on(notebook)


@pytest.mark.parametrize("name", ["Out", "_oh", "get_ipython"])
@pytest.mark.parametrize("change", ["del {}", "{} = 5"])
def test_deleting_or_replacing_ipythons_own_names_in_a_scope_breaks_nothing(
    notebook: Kernel, change: str, name: str
) -> None:
    works(notebook, "x = 'old'", "%experiment start a")
    for code in (f"x = 'new'\n{change.format(name)}", "1 + 1", "import IPython as i"):
        notebook.run(code)
    notebook.run("i.get_ipython().run_line_magic('experiment', 'end')")
    assert notebook.value("x") == "old"
    works(notebook, "from IPython import get_ipython\n_oh, __name__ = {}, '__main__'\n%reset -f")
    goes_on(notebook)


def test_threads_that_add_and_remove_names_during_an_exit_do_not_stop_it(notebook: Kernel) -> None:
    works(
        notebook,
        "import threading\nold = 'old'\nstop = threading.Event()\ncounts = [0]\n"
        "def churn():\n"
        "    space, number = globals(), 0\n"
        "    while not stop.is_set():\n"
        "        number += 1\n"
        "        space[f'churn{number % 500}'] = number\n"
        "        space.pop(f'churn{(number + 250) % 500}', None)\n"
        "        counts[0] = number\n"
        "threads = [threading.Thread(target=churn) for _ in range(2)]\nfor thread in threads: thread.start()",
    )
    for _ in range(2):
        works(notebook, "%experiment start a", "x = 1; old = 'new'", "%experiment status", "%experiment end")
        assert notebook.value("old") == "old"
        assert "x" not in names(notebook)
    works(notebook, "stop.set()\nfor thread in threads: thread.join()")
    assert notebook.value("counts[0] > 100") is True
    goes_on(notebook)
