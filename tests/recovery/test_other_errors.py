"""After an interrupt the memory is back; other errors keep their frames, for %debug and %tb."""

from __future__ import annotations

import pytest

from tests.kernel import Kernel
from tests.recovery.steps import fails
from tests.steps import works


def test_an_interrupt_in_a_training_loop_gives_the_memory_back(notebook: Kernel) -> None:
    works(
        notebook,
        "from tests.waiting import announce\ndef train():\n    weights = big(64)\n    for step in range(10 ** 9):\n"
        "        batch = big(4)\n        if step == 3: announce()",
    )
    reply = fails(notebook, "train()", interrupt_when="waits here")
    assert reply.error == "KeyboardInterrupt"
    assert notebook.value("alive()") == 0
    (text,) = reply.reports("recovery")
    assert "interrupted (KeyboardInterrupt)" in text
    assert "weights" in text
    reply = fails(notebook, "announce()", interrupt_when="waits here")
    assert reply.reports("recovery") == []


def test_an_interrupt_of_an_async_cell_gives_the_memory_back(notebook: Kernel) -> None:
    works(
        notebook,
        "async def train():\n    weights = big(8)\n    print('it trains', flush=True)\n"
        "    while True: await asyncio.sleep(0.01)",
    )
    reply = fails(notebook, "await train()", interrupt_when="it trains")
    assert reply.error in ("KeyboardInterrupt", "CancelledError")
    works(notebook, "pass")
    assert notebook.value("alive()") == 0


FAILING = "def f():\n    secret = big()\n    raise {}\nf()"


@pytest.mark.parametrize(
    ("policy", "oom", "interrupt", "other"),
    [("never", 1, 1, 1), ("oom", 0, 1, 1), ("oom+interrupt", 0, 0, 1), ("always", 0, 0, 0)],
)
def test_the_option_says_after_which_errors_frames_are_released(
    notebook: Kernel, policy: str, oom: int, interrupt: int, other: int
) -> None:
    works(notebook, f"%config IPyGpuMem.release_frames = '{policy}'")
    for error, left in (("MemoryError", oom), ("KeyboardInterrupt", interrupt), ("ValueError", other)):
        works(notebook, "watched.clear(); gc.collect()")
        fails(notebook, FAILING.format(error))
        assert notebook.value("alive()") == left, error
        assert notebook.value("len(watched)") == 1
        works(notebook, "pass")


def test_an_error_from_before_a_scope_keeps_its_frames_after_it(notebook: Kernel) -> None:
    fails(notebook, FAILING.format("ValueError"))
    works(notebook, "%%experiment a\nx = 1")
    assert notebook.value("alive()") == 1
    assert notebook.value(
        "str([f.f_locals['secret'][0] for f, _ in __import__('traceback').walk_tb(sys.last_traceback)"
        " if 'secret' in f.f_locals])"
    ) in ("[1.0]", "[np.float64(1.0)]")


def test_gpumem_free_gives_back_what_a_kept_traceback_holds(notebook: Kernel) -> None:
    fails(notebook, FAILING.format("ValueError"))
    assert notebook.value("alive()") == 1
    works(notebook, "%gpumem free")
    assert notebook.value("alive()") == 0
    assert "ValueError" in notebook.run("%tb").traceback


def test_an_error_that_was_caught_long_ago_is_nobodys_business(notebook: Kernel) -> None:
    works(notebook, "kept = None\ntry:\n    (lambda x: 1 / 0)(big())\nexcept ZeroDivisionError as e:\n    kept = e")
    fails(notebook, FAILING.format("MemoryError"))
    assert notebook.value("alive()") == 1
    assert notebook.value("float(kept.__traceback__.tb_next.tb_frame.f_locals['x'][0])") == 1.0


@pytest.mark.parametrize("error", ["ValueError", "MemoryError"])
def test_debug_reads_locals_but_none_that_an_oom_released(notebook: Kernel, error: str) -> None:
    fails(notebook, f"def f():\n    secret = 'the answer is ' + str(6 * 7)\n    x = big()\n    raise {error}\nf()")
    works(notebook, "pass")
    text = notebook.run("%debug", answers=["p 'still ' + 'here'", "p secret", "q"]).stdout
    kept = error == "ValueError"
    assert "still here" in text
    assert ("the answer is 42" in text, notebook.value("alive()")) == (kept, kept)
