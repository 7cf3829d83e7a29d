"""The scenarios, with ipygpumem, in real kernels; each in one way.

The other way of most is in tests/gpu. ``make torture`` runs all of them in all ways and compares
with other tools.
"""

from collections.abc import Callable, Iterator

import pytest

from benchmarks.harness.runner import CELL, PLAIN, SPAN, Runner, TortureKernel, Way
from benchmarks.harness.scenarios import SCENARIOS, Scenario
from tests.steps import run_failing, run_quietly

_CASES = [
    pytest.param(
        way,
        scenario,
        id=f"{way.name}-{scenario.name}",
        marks=[pytest.mark.thorough] * bool(scenario.needs),
    )
    for scenario in SCENARIOS
    for way in ([CELL] if CELL.serves(scenario) else [SPAN])
    if not scenario.alone
    and not (scenario.needs and scenario.holder)  # told of in tests/torch_cpu/test_holders.py
]


@pytest.fixture(scope="module")
def runner_for() -> Iterator[Callable[[Way], Runner]]:
    """One runner for each way, with a kernel that lasts as long as no scenario leaves something in
    it.
    """
    runners: dict[str, Runner] = {}
    yield lambda way: runners.setdefault(way.name, Runner(way))
    for runner in runners.values():
        runner.close()


@pytest.mark.parametrize(("way", "scenario"), _CASES)
def test_all_memory_is_freed_unless_held(
    way: Way, scenario: Scenario, runner_for: Callable[[Way], Runner]
) -> None:
    if scenario.missing():
        pytest.skip(scenario.missing())
    result = runner_for(way).run(scenario)
    assert not result.trouble, result.trouble
    assert result.is_met(), (
        f"{result.share:.1%} came back, due are {scenario.share:.0%}: {result.told}"
    )
    assert scenario.holder in result.told


_WORDS = {
    "a thread that outlives the scope": "only the user knows how to end a running thread",
    "backward(create_graph=True)": "no code reaches a cycle in torch's own C++ code",
}
"""Scenarios whose advice is no line."""


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(
            scenario, id=scenario.name, marks=[pytest.mark.thorough] * bool(scenario.needs)
        )
        for scenario in SCENARIOS
        if scenario.holder and scenario.name not in _WORDS
    ],
)
def test_the_printed_lines_free_memory_held_on_purpose(
    scenario: Scenario, runner_for: Callable[[Way], Runner]
) -> None:
    if scenario.missing():
        pytest.skip(scenario.missing())
    way = CELL if CELL.serves(scenario) else SPAN
    result = runner_for(way).run_with_lines(scenario)
    assert result.made_bytes >= 64 << 20
    assert result.share >= 0.9


def test_without_the_extension_an_error_keeps_its_memory(
    runner_for: Callable[[Way], Runner],
) -> None:
    """The same measure sees a leak: the figures above are no matter of course."""
    scenario = next(scenario for scenario in SCENARIOS if scenario.name == "an error in a function")
    assert runner_for(PLAIN).run(scenario).share == 0.0


def test_stored_run_and_debugged_code_works_after_an_experiment() -> None:
    """The end of an experiment empties IPython's hidden stores; nothing that the user can see
    changes.
    """
    with TortureKernel() as kernel:
        run_quietly(
            kernel,
            "%load_ext ipygpumem",
            """
            kept = [1]
            %store kept
            """,
            "%cd -q {__import__('tempfile').mkdtemp()}",
        )

        # A script and a stored variable from before the experiment.
        run_quietly(
            kernel,
            "with open('script.py', 'w') as file:\n    file.write('data = [2]\\ndef f(): return "
            "data')",
        )
        run_quietly(kernel, "%run script.py")
        run_quietly(
            kernel,
            "%store -r kept",
            """
            stored = kept
            del kept
            """,
            """
            %%experiment a
            x = [3]
            %store x
            """,
        )

        # They work after it, and so does what it has stored.
        run_quietly(kernel, "%store -r kept", "%store -r x")
        assert kernel.value("kept is stored, x, f()") == (True, [3], [2])

        # So does the debugger.
        run_failing(
            kernel,
            """
            def g():
                y = 5
                1 / 0
            g()
            """,
            "ZeroDivisionError",
        )
        assert "42" in kernel.run("%debug", answers=["p y + 37", "q"]).stdout
