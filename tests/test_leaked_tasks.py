"""Data that tasks keep after an experiment has lines that cancel the tasks."""

import pytest

from benchmarks.harness.kernel import Kernel
from tests.kernel_records import READ_LEAKS, READ_WHY, leak_rows, number_alive, survivor_rows
from tests.process_memory import linux
from tests.steps import experiment, run_cells, tidied_kernel

MIB = 1 << 20
shared_kernel, kernel = tidied_kernel("%reset -f", READ_WHY, hides_libraries=True)
"""A kernel without the names of earlier tests, and without sight of what they have imported: with
pandas and torch a look takes a second longer.
"""

_MANY = 200
"""Number of arrays of 80 kB: too small for rows of their own."""


@linux
@pytest.mark.parametrize(
    ("setup", "code", "line"),
    [
        (
            "outer = {'tasks': []}",
            "outer['tasks'] += [asyncio.create_task(wait(array())) for _ in range(MANY)]",
            'while outer["tasks"]: outer["tasks"].pop().cancel()',
        ),
        (
            "outer = {}",
            "outer.update((n, asyncio.create_task(wait(array()))) for n in range(MANY))",
            "while outer: outer.popitem()[1].cancel()",
        ),
        (
            "outer = set()",
            "outer.update(asyncio.create_task(wait(array())) for _ in range(MANY))",
            "while outer: outer.pop().cancel()",
        ),
        (
            "outer = [asyncio.create_task(asyncio.sleep(1000))]",
            "outer += [asyncio.create_task(wait(array())) for _ in range(MANY)]",
            f"for _position in range({_MANY}, 0, -1): outer.pop(_position).cancel(); del _position",
        ),
        (
            "outer = []",
            "outer += [asyncio.create_task(give()) for _ in range(MANY)]",
            "outer.clear()",
        ),
        (
            "outer = []",
            """
            outer += [asyncio.get_running_loop().create_future() for _ in range(MANY)]
            for future in outer: future.set_result(array())
            """,
            "outer.clear()",
        ),
        (
            "outer = {'done': [0]}; pool = concurrent.futures.ThreadPoolExecutor(1)",
            """
            outer["done"] += [pool.submit(array) for _ in range(MANY)]
            concurrent.futures.wait(outer["done"][1:]);
            """,
            'del outer["done"][1:]',
        ),
    ],
    ids=["pending", "dict", "set", "next to an older one", "done", "futures", "pool"],
)
def test_one_line_frees_a_container_of_tasks(
    kernel: Kernel, setup: str, code: str, line: str
) -> None:
    run_cells(kernel, READ_LEAKS, setup)
    two_turns = "await asyncio.sleep(0)\nawait asyncio.sleep(0)"
    run_cells(kernel, experiment(code.replace("MANY", str(_MANY)), two_turns))
    assert number_alive(kernel) == _MANY
    rows = leak_rows(kernel)
    assert [row.line for row in rows] == [line]
    # Each task has an array of 10,000 numbers of 8 bytes.
    assert sum(row.size_bytes for row in rows) >= _MANY * 80_000
    run_cells(kernel, line)
    assert number_alive(kernel) == 0
    assert leak_rows(kernel) == []


@linux
@pytest.mark.parametrize("number", [1, _MANY])
def test_tasks_that_only_the_loop_keeps_are_cancelled(kernel: Kernel, number: int) -> None:
    run_cells(
        kernel,
        READ_LEAKS,
        """
        import asyncio
        async def other():
            await asyncio.sleep(1000)
        kept = asyncio.create_task(other())
        def start(number):
            for _ in range(number):
                made = np.ones(40_000_000 // 8 // number)
                watched.append(weakref.ref(made))
                asyncio.create_task(wait(made))
        """,
        f"""
        %%experiment e
        start({number})
        await asyncio.sleep(0)
        """,
    )
    assert number_alive(kernel) == number
    for rows in (survivor_rows(kernel), leak_rows(kernel)):
        assert [row.path.startswith("the event loop") for row in rows] == [True]
        assert rows[0].size_bytes == pytest.approx(40_000_000, rel=0.1)
    run_cells(kernel, rows[0].line)
    assert number_alive(kernel) == 0
    assert leak_rows(kernel) == []
    assert kernel.value("kept.done()") is False


def test_a_task_that_waits_for_a_condition_is_cancelled(kernel: Kernel) -> None:
    run_cells(
        kernel,
        READ_LEAKS,
        """
        async def work():
            data = np.ones(2**20)
            async with condition:
                await condition.wait()
            return data
        condition = asyncio.Condition()
        tasks, errors = [], []
        """,
        """
        %%experiment e
        tasks.append(asyncio.ensure_future(work()))
        tasks[0].add_done_callback(lambda task: errors.append(task.cancelled()))
        await asyncio.sleep(0.01)
        """,
    )
    (row,) = survivor_rows(kernel)
    run_cells(kernel, row.line, "await asyncio.sleep(0.01)")
    assert kernel.value("errors") == [True]


def test_a_line_for_tasks_says_that_some_may_be_older(kernel: Kernel) -> None:
    run_cells(kernel, READ_LEAKS, "tasks = {asyncio.create_task(wait(np.ones(2**18)))}")
    run_cells(kernel, experiment("tasks.add(asyncio.create_task(wait(np.ones(2**19))))"))
    (row,) = leak_rows(kernel)
    # The older array of 2 MiB, and the new one of 4.
    assert row.size_bytes // MIB == 6
    assert row.line.endswith("  # 2 MiB of it may be older than the experiment")
    run_cells(kernel, row.line, "await asyncio.sleep(0)")
    assert leak_rows(kernel) == []
