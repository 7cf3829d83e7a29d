"""Data that tasks keep after an experiment has lines that cancel the tasks."""

import pytest

from benchmarks.harness.kernel import Kernel
from tests.kernel_records import ASK, LEFT, alive, left, left_by_experiment
from tests.process_memory import linux
from tests.steps import tidied_kernel, works

MIB = 1 << 20
shared_kernel, kernel = tidied_kernel("%reset -f", ASK, hides_libraries=True)
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
    works(kernel, LEFT, setup)
    code = "\n".join(part.strip() for part in code.replace("MANY", str(_MANY)).splitlines())
    works(kernel, f"%%experiment e\n{code}\nawait asyncio.sleep(0)\nawait asyncio.sleep(0)")
    assert alive(kernel) == _MANY
    rows = left(kernel)
    assert [advice for _, _, advice in rows] == [line]
    assert sum(size for size, _, _ in rows) >= _MANY * 80_000
    works(kernel, line)
    assert alive(kernel) == 0
    assert left(kernel) == []


@linux
@pytest.mark.parametrize("number", [1, _MANY])
def test_tasks_that_only_the_loop_keeps_are_cancelled(kernel: Kernel, number: int) -> None:
    works(
        kernel,
        LEFT,
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
        f"%%experiment e\nstart({number})\nawait asyncio.sleep(0)",
    )
    assert alive(kernel) == number
    for rows in (left_by_experiment(kernel), left(kernel)):
        assert [path.startswith("the event loop") for _, path, _ in rows] == [True]
        assert rows[0][0] == pytest.approx(40_000_000, rel=0.1)
    works(kernel, rows[0][2])
    assert alive(kernel) == 0
    assert left(kernel) == []
    assert kernel.value("kept.done()") is False


def test_a_task_that_waits_for_a_condition_is_cancelled(kernel: Kernel) -> None:
    works(
        kernel,
        LEFT,
        """
        async def work():
            data = np.ones(2**20)
            async with condition:
                await condition.wait()
            return data
        condition = asyncio.Condition()
        tasks, errors = [], []
        """,
        """%%experiment e
tasks.append(asyncio.ensure_future(work()))
tasks[0].add_done_callback(lambda task: errors.append(task.cancelled()))
await asyncio.sleep(0.01)
""",
    )
    ((_, _, line),) = left_by_experiment(kernel)
    works(kernel, line, "await asyncio.sleep(0.01)")
    assert kernel.value("errors") == [True]


def test_a_line_for_tasks_says_that_some_may_be_older(kernel: Kernel) -> None:
    works(kernel, LEFT, "tasks = {asyncio.create_task(wait(np.ones(2**18)))}")
    works(kernel, "%%experiment e\ntasks.add(asyncio.create_task(wait(np.ones(2**19))))")
    ((size_bytes, _, line),) = left(kernel)
    assert size_bytes // MIB == 6
    assert line.endswith("  # 2 MiB of it may be older than the experiment")
    works(kernel, line, "await asyncio.sleep(0)")
    assert left(kernel) == []
