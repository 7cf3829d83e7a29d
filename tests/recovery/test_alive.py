"""Objects that are alive, or the user's own, are not harmed by the release of an error."""

import concurrent.futures.thread  # noqa: F401  # whose workers a look leaves out
import gc
import weakref
from collections.abc import Callable

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.estimating.user_lines import _innermost_frame_of_estimates
from ipygpumem.extras.guard.cell_threads import CellThreads
from ipygpumem.heap.knowledge.frames import (
    background_frames,
    frames_of_other_threads,
    running_ids,
)
from ipygpumem.reclaim.frames import unfinished_frames
from tests.recovery.cases import report_of_recovery
from tests.steps import SHOW_LIBRARIES, experiment, run_cells, run_failing

WORKER = """
queue = asyncio.Queue()
async def worker():
    while True:
        future, job = await queue.get()
        try: future.set_result(await job())
        except Exception as error: future.set_exception(error)
async def ask(job):
    future = asyncio.get_running_loop().create_future()
    await queue.put((future, job))
    return await asyncio.wait_for(future, 20)
async def fine(): return 'fine'
async def runs_out():
    x = big()
    raise MemoryError
async def waits_for_long(): await asyncio.wait_for(asyncio.sleep(60), 0.05)
async def wrong(): return {}['missing']
task = asyncio.ensure_future(worker())
"""


@pytest.fixture
def worker(notebook: Kernel) -> Kernel:
    """A kernel with a task of the user's that does jobs and hands their errors on."""
    run_cells(notebook, WORKER)
    return notebook


def test_a_worker_survives_the_release_of_its_jobs_errors(worker: Kernel) -> None:
    report_of_recovery(worker, "await ask(runs_out)")
    assert run_cells(worker, "await ask(fine)").result == "'fine'"
    run_failing(worker, "await ask(waits_for_long)")
    assert run_cells(worker, "await ask(fine)").result == "'fine'"


def test_a_worker_from_outside_survives_the_end_of_a_scope(worker: Kernel) -> None:
    for cell in (
        "await ask(wrong)",
        "await ask(waits_for_long)",
        "await asyncio.gather(ask(fine), ask(wrong))",
    ):
        run_failing(worker, experiment(cell, name="a"))
        assert run_cells(worker, "await ask(fine)").result == "'fine'", cell
    run_failing(worker, "await ask(wrong)")
    run_cells(worker, "%gpumem free")
    assert run_cells(worker, "await ask(fine)").result == "'fine'"


def test_a_generator_that_waits_keeps_its_place_and_its_locals(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        def tries():
            kept = big()
            for _ in range(2):
                try: raise MemoryError
                except MemoryError as error: yield error
            yield kept
        it = tries()
        """,
    )
    for _ in range(2):
        (text,) = run_failing(notebook, "raise next(it)").reports("recovery")
        assert "kept" not in text  # it has not been released, and is not said to be
    assert run_cells(notebook, "float(next(it)[0])").result == "1.0"


def test_a_thread_that_goes_on_keeps_its_locals(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        import queue, threading
        asked, answers = queue.Queue(), queue.Queue()
        def serve():
            kept = big()
            while True:
                asked.get()
                try: raise MemoryError
                except MemoryError as error: answers.put(error)
                asked.get(); answers.put(float(kept[0]))
        thread = threading.Thread(target=serve, daemon=True); thread.start()
        """,
    )
    (text,) = run_failing(notebook, "asked.put(0); raise answers.get()").reports("recovery")
    assert "kept" not in text
    assert run_cells(notebook, "asked.put(0); answers.get(timeout=600)").result == "1.0"


def test_a_running_function_pins_only_objects_that_it_needs(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        def main():
            batch = big()
            try:
                with ipygpumem.experiment('a', report='none'): raise MemoryError
            except MemoryError: batch = None
            gc.collect()
            return alive()
        """,
    )
    assert run_cells(notebook, "main()").result == "0"


def test_a_release_does_not_empty_a_registry_class(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        registry = {'old': 1}
        class Meta(type):
            @classmethod
            def __prepare__(cls, name, bases): return registry
        def f():
            class A(metaclass=Meta):
                x = 7
                raise MemoryError
        """,
    )
    run_failing(notebook, "f()")
    assert notebook.value("(registry['old'], registry['x'])") == (1, 7)


@pytest.mark.parametrize("error", ["MemoryError", "ValueError"])
def test_a_release_does_not_empty_the_namespace_of_exec(notebook: Kernel, error: str) -> None:
    run_cells(notebook, f"ns = {{'__qualname__': 'mine'}}\nsource = 'x = 7\\nraise {error}'")
    run_failing(notebook, experiment("exec(source, {}, ns)", name="a"))
    assert notebook.value("(ns['x'], ns['__qualname__'])") == (7, "mine")


def test_a_release_does_not_empty_saved_locals_of_a_function(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        kept = []
        def f(rate):
            kept.append(locals())
            raise MemoryError
        """,
    )
    run_failing(notebook, "f(0.1)")
    assert notebook.value("kept[0]['rate']") == 0.1


def test_an_attribute_errors_object_is_freed(notebook: Kernel) -> None:
    run_cells(notebook, SHOW_LIBRARIES)
    run_failing(
        notebook,
        """
        %%experiment a
        class Model: pass
        m = Model(); m.weights = big()
        m.missing
        """,
    )
    assert notebook.value("alive()") == 0
    reply = run_failing(
        notebook,
        """
        %%experiment a
        error = ValueError(); error.batch = big()
        raise error
        """,
    )
    (report,) = reply.survivors()
    assert "held by the last error" in report
    run_cells(notebook, "import sys; sys.last_value = sys.last_exc = None")
    assert "import sys; sys.last_value = sys.last_exc = None" in report
    assert notebook.value("alive()") == 0


def threads_of_cell() -> CellThreads:
    """Return the threads of a cell, of which this one is one."""
    threads = CellThreads(lambda: 0)
    threads.begin()
    return threads


LOOKS: dict[str, Callable[[], object]] = {
    "finished frames": lambda: unfinished_frames([]),
    "the line of an estimate": _innermost_frame_of_estimates,
    "a cell's threads": lambda: threads_of_cell().are_busy(),
    "all running functions": running_ids,
    "functions of other threads": lambda: [*background_frames(), *frames_of_other_threads()],
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_at_running_frames_keeps_none_of_them_alive(look: str) -> None:
    """A frame in one of its own variables would be a cycle, which keeps its callers alive."""

    class Held:
        """Is kept by a caller's frame."""

    def caller() -> weakref.ref[Held]:
        held = Held()
        LOOKS[look]()
        return weakref.ref(held)

    gc.collect()
    gc.disable()
    try:
        assert caller()() is None
    finally:
        gc.enable()
