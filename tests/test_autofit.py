"""Autofit: which values are tried, what counts as fitting, functions in scripts, and cells without torch."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import ipygpumem
from ipygpumem.errors import AutofitError
from ipygpumem.fitting.fit import OUT_OF_MEMORY, OVER, Fit, Options, Try
from ipygpumem.fitting.functions import run_tries
from ipygpumem.fitting.room import crowded_device, failed_device
from ipygpumem.freeing.tracebacks import Failure
from ipygpumem.measuring.meter import Meter
from ipygpumem.model import Usage
from ipygpumem.reports import text
from ipygpumem.reports.autofit import autofit_report
from tests.fakes import FakeProbe
from tests.kernel import Kernel
from tests.steps import tidied_kernel, works
from tests.test_budget import TEXT as REFUSED

# -- which values are tried -----------------------------------------------------------------------------------


def tried(start: dict[str, Any], fits: Callable[..., bool], **options: Any) -> list[Any]:
    """What a plan tries where ``fits`` says what fits: plain numbers where there is one variable."""
    plan = Options(**options).plan(start)
    values = []
    while True:
        values.append(tuple(plan.values.values()) if len(start) > 1 else next(iter(plan.values.values())))
        if not plan.note(fits=fits(**plan.values)):
            return values


def test_halving_stops_at_the_first_value_that_fits() -> None:
    assert tried({"n": 1024}, lambda n: n <= 200) == [1024, 512, 256, 128]
    assert tried({"n": 1024}, lambda n: True) == [1024]
    assert tried({"n": 7}, lambda n: False) == [7, 3, 1]


def test_the_minimum_is_tried_and_nothing_below_it() -> None:
    assert tried({"n": 100}, lambda n: False, min=30) == [100, 50, 30]
    assert tried({"n": 30}, lambda n: False, min=30) == [30]


def test_a_factor_makes_whole_numbers_smaller_by_one_at_least() -> None:
    assert tried({"n": 100}, lambda n: n <= 70, step=0.9) == [100, 90, 81, 72, 64]
    assert tried({"n": 4}, lambda n: False, step="0.9") == [4, 3, 2, 1]


def test_floats_stay_floats() -> None:
    found = tried({"share": 0.8}, lambda share: share < 0.2)
    assert found == [0.8, 0.4, 0.2, 0.1]
    assert tried({"share": 0.8}, lambda share: False, max_tries=2) == [0.8, 0.4, 0.2]


def test_a_float_that_is_whole_stays_whole_unless_it_is_a_share() -> None:
    found = tried({"n": 1e3}, lambda n: False)
    assert found == [1000, 500, 250, 125, 62, 31, 15, 7, 3, 1]
    assert {type(value) for value in found} == {float}
    assert tried({"n": 1e3}, lambda n: n <= 70, step="search", headroom=0)[-1] == 70
    assert tried({"n": 8.0}, lambda n: False, min=0.5) == [8.0, 4.0, 2.0, 1.0, 0.5]
    assert tried({"n": 2.5}, lambda n: n < 0.5) == [2.5, 1.25, 0.625, 0.3125]


@pytest.mark.parametrize("largest", [1, 2, 3, 99, 100, 127, 128, 511, 700, 1000, 1023])
def test_a_search_ends_with_the_largest_that_fits_and_tries_no_value_twice_but_that(largest: int) -> None:
    values = tried({"n": 1024}, lambda n: n <= largest, step="search")
    assert values[-1] == largest
    assert len(set(values)) >= len(values) - 1
    assert {largest, largest + 1} <= set(values)


def test_a_search_that_has_no_tries_left_ends_with_the_largest_that_fitted() -> None:
    assert tried({"n": 1024}, lambda n: n <= 700, step="search", max_tries=3) == [1024, 512, 768, 640]
    assert tried({"n": 1024}, lambda n: n <= 600, step="search", max_tries=3) == [1024, 512, 768, 640, 512]
    assert tried({"n": 1024}, lambda n: False, step="search", max_tries=2) == [1024, 512, 256]


def test_ten_tries_after_the_first_are_the_most_and_enough_from_1024_on() -> None:
    assert tried({"n": 1024}, lambda n: n <= 1) == [1024 >> turn for turn in range(11)]
    assert tried({"n": 2048}, lambda n: n <= 1) == [2048 >> turn for turn in range(11)]
    for largest in range(1, 1025):
        plan = Options(step="search").plan({"n": 1024})
        while plan.note(fits=plan.values["n"] <= largest):
            pass
        assert (plan.values["n"], plan.exhausted) == (largest, False)


def test_without_further_tries_there_is_one() -> None:
    assert tried({"n": 8}, lambda n: False, max_tries=0) == [8]


def test_a_search_among_floats_ends_when_it_is_close() -> None:
    values = tried({"share": 1.0}, lambda share: share <= 0.61, step="search")
    assert 0.6 <= values[-1] <= 0.61
    assert len(values) < 12


def test_a_value_that_fitted_in_a_search_and_then_does_not_is_halved() -> None:
    answers = iter([False, True, False, False, False, False])
    plan = Options(step="search").plan({"n": 8})
    values = []
    for answer in answers:
        values.append(plan.values["n"])
        if not plan.note(fits=answer):
            break
    assert values == [8, 4, 6, 5, 4, 2]


def test_several_variables_are_reduced_in_turn_and_each_has_its_minimum() -> None:
    values = tried({"batch": 8, "length": 64}, lambda batch, length: batch * length <= 40, min={"length": 16})
    assert values == [(8, 64), (4, 64), (4, 32), (2, 32), (2, 16)]
    everything = tried({"batch": 2, "length": 64}, lambda batch, length: False, min={"length": 16})
    assert everything == [(2, 64), (1, 64), (1, 32), (1, 16)]


def test_a_search_of_several_variables_makes_one_after_the_other_larger() -> None:
    values = tried({"batch": 8, "length": 64}, lambda batch, length: batch * length <= 40, step="search", max_tries=20)
    down, batch, length = values[:5], values[5:7], values[7:]
    assert down == [(8, 64), (4, 64), (4, 32), (2, 32), (2, 16)]
    assert batch == [(5, 16), (3, 16)]  # 3 × 16 is too much, so 2 stays
    assert length == [(2, 24), (2, 20), (2, 22), (2, 21), (2, 20)]  # 32 failed beside 2 before


def test_a_search_of_several_variables_stops_at_their_starts() -> None:
    values = tried({"batch": 8, "length": 8}, lambda batch, length: batch <= 5, step="search")
    assert values == [(8, 8), (4, 8), (6, 8), (5, 8)]
    values = tried({"batch": 8, "length": 8}, lambda batch, length: length <= 5, step="search", max_tries=20)
    assert values == [(8, 8), (4, 8), (4, 4), (6, 4), (7, 4), (8, 4), (8, 6), (8, 5)]
    values = tried({"share": 0.8, "n": 8}, lambda share, n: n <= 4, step="search", max_tries=20)
    assert values[-1][0] > 0.79
    assert values[-1][1] == 4


def test_a_search_of_several_variables_that_has_no_tries_left_says_that_more_may_fit() -> None:
    plan = Options(step="search", max_tries=3).plan({"batch": 8, "length": 8})
    while plan.note(fits=plan.values["length"] <= 5):
        pass
    assert (plan.values, plan.exhausted) == ({"batch": 6, "length": 4}, True)
    report = text.render([autofit_report([Try(plan.values, "fits", 1.0, ())], [], plan)])
    assert "all tries are used up: larger values may fit, too" in report


@pytest.mark.parametrize(
    ("start", "options", "said"),
    [
        ({}, {}, "needs a variable"),
        ({"n": "8"}, {}, "n is a str"),
        ({"n": True}, {}, "n is a bool"),
        ({"n": 0}, {}, "start from a positive number"),
        ({"n": float("nan")}, {}, "start from a positive number"),
        ({"n": 8}, {"min": 9}, "the minimum of n is 9, above its start 8"),
        ({"n": 8}, {"min": -1}, "below 0"),
        ({"n": 8}, {"min": {"m": 1}}, "the minimum of m: there is no variable of that name"),
        ({"n": 8}, {"min": "x"}, "the minimum of n is a str"),
        ({"n": 8}, {"step": "0.9x"}, "write halve, search, or a factor"),
        ({"n": 8}, {"step": 1.5}, "write halve, search, or a factor"),
        ({"n": 8}, {"step": None}, "write halve, search, or a factor"),
        ({"n": 8}, {"max_tries": -1}, r"max_tries .* must be a whole number, 0 or more"),
        ({"n": 8}, {"headroom": "lots"}, "write a share"),
        ({"n": 8}, {"headroom": 1.2}, "write a share"),
    ],
)
def test_what_makes_no_sense_is_said(start: dict[str, Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(AutofitError, match=said):
        ipygpumem.autofit(lambda **values: None, **{"min": None, **options}, **start)


# -- what counts as fitting -----------------------------------------------------------------------------------


def usage(device: str, peak: int, *, before: int = 0, **more: Any) -> Usage:
    return Usage(device, before, before, peak, 1000, "allocator", **more)


def test_headroom_counts_what_else_is_in_use_on_the_device() -> None:
    beside = {"reserved_bytes": 400, "used_bytes": 600}  # 200 are others' and the context's
    assert crowded_device([usage("cuda:0", 750, **beside)], 0.05, {}) is None
    assert crowded_device([usage("cuda:0", 751, **beside)], 0.05, {}) == "cuda:0"
    assert crowded_device([usage("cuda:0", 999, **beside)], 0.0, {}) is None


def test_the_host_counts_where_no_accelerator_was_used() -> None:
    host = usage("cpu", 500, before=100)
    assert crowded_device([host], 0.3, {}, host_available=699) == "cpu"  # 201 are others'
    assert crowded_device([host], 0.3, {}, host_available=800) is None
    assert crowded_device([host, usage("cuda:0", 10)], 0.3, {}, host_available=699) is None


def test_a_budget_takes_the_devices_place() -> None:
    host = usage("cpu", 500, before=100)
    assert crowded_device([host], 0.0, {"cpu": 500}) is None
    assert crowded_device([host], 0.0, {"cpu": 499}) == "cpu"
    assert crowded_device([host], 0.1, {"cpu": 550}) == "cpu"


@pytest.mark.parametrize(
    ("error", "message", "device"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total", "cuda:1"),
        ("OutOfMemoryError", "Allocation on device 1 would exceed allowed memory. (out of memory)", "cuda:1"),
        ("OutOfMemoryError", "CUDA out of memory.", "cuda:0"),
        ("RuntimeError", "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes", "cpu"),
        ("MemoryError", "", "cpu"),
    ],
)
def test_the_device_that_ran_out_is_read_from_the_error(error: str, message: str, device: str) -> None:
    usages = [usage("cpu", 10), usage("cuda:0", 100), usage("cuda:1", 50)]
    assert failed_device(Failure("oom", error, message), usages) == device


# -- functions ------------------------------------------------------------------------------------------------


class Big:
    """What a test follows with a weak reference."""


@pytest.fixture
def meter() -> Iterator[Meter]:
    meter = Meter([FakeProbe()])
    yield meter
    meter.close()


def fit(meter: Meter, start: dict[str, Any], **options: Any) -> Fit:
    return Fit(Options(**options).plan(start), meter)


def test_a_function_is_called_until_it_fits_and_its_result_comes_back(meter: Meter) -> None:
    def train(batch_size: int) -> str:
        if batch_size > 100:
            raise MemoryError
        return f"trained with {batch_size}"

    found = run_tries(train, fit(meter, {"batch_size": 512}))
    assert (found.value, found.values, found.result) == (64, {"batch_size": 64}, "trained with 64")
    assert [(item.values["batch_size"], item.outcome) for item in found.tries] == [
        (512, "out of memory"),
        (256, "out of memory"),
        (128, "out of memory"),
        (64, "fits"),
    ]


def test_what_a_failed_call_held_is_gone_before_the_next_even_what_an_except_keeps(meter: Meter) -> None:
    alive: list[weakref.ref[Big]] = []
    seen = []

    def step(big: Big) -> None:
        more = Big()
        alive.append(weakref.ref(more))
        raise MemoryError

    def train(n: int) -> None:
        seen.append(sum(ref() is not None for ref in alive))
        if n > 2:
            big = Big()
            alive.append(weakref.ref(big))
            try:
                step(big)
            except MemoryError as error:
                raise RuntimeError("the step failed") from error

    run_tries(train, fit(meter, {"n": 8}))
    assert len(alive) == 4
    assert seen == [0, 0, 0]


def test_an_oom_inside_an_except_block_of_the_caller_is_released_as_well(meter: Meter) -> None:
    big: list[weakref.ref[Big]] = []

    def train(n: int) -> int:
        if n > 1:
            mine = Big()
            big.append(weakref.ref(mine))
            raise MemoryError
        return sum(ref() is not None for ref in big)

    try:
        raise ValueError("the user's own")
    except ValueError:
        found = run_tries(train, fit(meter, {"n": 4}))
    assert found.result == 0


def test_another_error_stops_at_once_and_keeps_its_frames(meter: Meter) -> None:
    calls = []

    def train(n: int) -> None:
        calls.append(n)
        precious = n
        if n < 8:
            raise ValueError(f"not {precious}")
        raise MemoryError

    with pytest.raises(ValueError, match="not 4") as caught:
        run_tries(train, fit(meter, {"n": 8}))
    assert calls == [8, 4]
    assert caught.traceback[-1].frame.f_locals["precious"] == 4


def test_nothing_fits_says_what_would_be_needed() -> None:
    probe = FakeProbe()
    meter = Meter([probe])
    probe.set(300)

    def train(n: int) -> None:
        probe.spike(700)
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 500 bytes")

    with pytest.raises(AutofitError) as caught:
        run_tries(train, fit(meter, {"n": 2}))
    assert str(caught.value) == (
        "even n=1 does not fit (out of memory): it needs at least 1.2 KiB of RAM, which has 1000 B"
    )
    meter.close()


def test_too_little_headroom_is_no_fit(meter: Meter) -> None:
    probe = FakeProbe("cuda:0")
    meter = Meter([probe])

    def train(n: int) -> int:
        probe.spike(n)
        return n

    found = run_tries(train, Fit(Options(step="search").plan({"n": 1000}), meter, headroom=0.1))
    assert found.result == 900
    assert found.tries[0] == Try({"n": 1000}, "too little headroom", found.tries[0].duration_seconds, *found_in(found))
    with pytest.raises(AutofitError) as caught:
        run_tries(train, Fit(Options(step="search", min=990).plan({"n": 1000}), meter, headroom=0.1))
    assert str(caught.value) == (
        "even n=990 does not fit (too little headroom): it needs 990 B of cuda:0 beside the 10% that must stay free"
    )
    meter.close()


def test_a_try_that_a_budget_refused_is_over_it() -> None:
    probe = FakeProbe("cuda:0")
    meter = Meter([probe])

    class OutOfMemoryError(RuntimeError): ...

    def train(n: int) -> None:
        probe.spike(9)
        raise OutOfMemoryError(REFUSED)

    limits: dict[str, int] = {}
    outcomes = []
    for limits["cuda:0"] in ((1 << 30) - 1, 4 * (1 << 30)):
        fit = Fit(Options(max_tries=0).plan({"n": 2}), meter, limits=lambda: limits)
        with pytest.raises(AutofitError, match=r"of cuda:0, of which 1\.00 GiB are allowed"):
            run_tries(train, fit)
        outcomes.append((fit.tries[-1].outcome, fit.tries[-1].limit_bytes))
    assert outcomes == [(OVER, (1 << 30)), (OUT_OF_MEMORY, (1 << 30))]
    meter.close()


def test_a_try_above_a_budget_is_called_so_and_one_that_leaves_no_headroom_in_it_is_not(meter: Meter) -> None:
    probe = FakeProbe("cuda:0")
    meter = Meter([probe])

    def train(n: int) -> int:
        probe.spike(n)
        return n

    plan = Options(step="search", max_tries=5).plan({"n": 1000})
    found = run_tries(train, Fit(plan, meter, headroom=0.1, limits=lambda: {"cuda:0": 500}))
    outcomes = {item.values["n"]: item.outcome for item in found.tries}
    assert outcomes == {
        1000: "over the budget",
        500: "too little headroom",
        250: "fits",
        375: "fits",
        437: "fits",
        468: "too little headroom",
    }
    meter.close()


def test_the_last_run_of_a_search_may_take_of_the_headroom_and_not_more(meter: Meter) -> None:
    probe = FakeProbe("cuda:0")
    meter = Meter([probe])

    def look(again: int) -> list[tuple[int, str]]:
        calls: list[int] = []

        def train(n: int) -> None:
            probe.spike(again if n in calls else n)
            calls.append(n)

        plan = Options(step="search", max_tries=2).plan({"n": 1000})
        found = Fit(plan, meter, headroom=0.1, limits=lambda: {"cuda:0": 600})
        with contextlib.suppress(AutofitError):
            run_tries(train, found)
        return [(item.values["n"], item.outcome) for item in found.tries]

    began = [(1000, "over the budget"), (500, "fits"), (750, "over the budget")]
    assert look(590) == [*began, (500, "fits")]
    assert look(610) == [*began, (500, "over the budget")]
    meter.close()


def found_in(found: Any) -> tuple[tuple[Usage, ...], str]:
    return found.tries[0].usages, "cuda:0"


def test_a_function_without_the_variable_and_an_autofit_in_another_are_errors() -> None:
    with pytest.raises(AutofitError, match="takes no argument 'batch_size'"):
        ipygpumem.autofit(lambda size: None, batch_size=8)
    with pytest.raises(AutofitError, match="an autofit is running already"):
        ipygpumem.autofit(lambda n: ipygpumem.autofit(lambda m: m, m=4), n=8)


def test_a_function_that_runs_later_is_an_error() -> None:
    async def awaits(n: int) -> int:
        return n

    def yields(n: int) -> Iterator[int]:
        yield n

    for function in (awaits, yields):
        with pytest.raises(AutofitError, match="runs nothing when it is called"):
            ipygpumem.autofit(function, n=8)


def test_the_decorator_returns_what_the_function_returns_and_reports_what_fitted() -> None:
    @ipygpumem.autofit(batch_size=64, step=0.5)
    def train(name: str, batch_size: int, *, epochs: int = 1) -> tuple[str, int, int]:
        """Train."""
        if batch_size > 20:
            raise MemoryError
        return name, batch_size, epochs

    assert train.fitted is None
    assert train("a", epochs=3) == ("a", 16, 3)
    assert train.fitted.values == {"batch_size": 16}
    assert train.fitted.result is None
    assert train("a", batch_size=8) == ("a", 8, 1)
    assert train.__doc__ == "Train."


LIMITED = """
import json, resource, sys
import ipygpumem
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

def train(mib):
    block = bytearray(mib << 20)
    return len(block) >> 20

found = ipygpumem.autofit(train, mib=8192)
print(json.dumps([found.value, found.result, found.tries[0].outcome, "IPython" in sys.modules, "torch" in sys.modules]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits a process's memory as Linux does")
def test_a_script_without_ipython_finds_what_fits_under_a_real_limit() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=120, check=True)
    value, result, first, ipython, torch = json.loads(done.stdout)
    assert (value, first, ipython, torch) == (result, "out of memory", False, False)
    assert value in (128, 256, 512)


# -- the report -----------------------------------------------------------------------------------------------


def test_the_table_marks_a_sampled_peak() -> None:
    tries = [Try({"n": size}, "fits", 1.0, (Usage("cpu", 0, 0, 2**20, None, "sampled"),)) for size in (8, 9)]
    assert text.render([autofit_report(tries, [], Options().plan({"n": 9}))]).count("1 MiB (sampled)") == 2


def test_the_table_has_a_row_for_each_try() -> None:
    plan = Options().plan({"batch_size": 1024})
    tries = [
        Try({"batch_size": 1024}, "out of memory", 0.5, (usage("cuda:0", 800),), "cuda:0", 2048),
        Try({"batch_size": 512}, "fits", 1.0, (usage("cpu", 9), usage("cuda:0", 600))),
    ]
    lines = text.render([autofit_report(tries, ["a note"], plan)]).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "autofit · batch_size=512 fits · 2 tries · 1.50 s",
        "batch_size peak cuda:0 outcome time",
        lines[2].strip(),
        "1024 800 B out of memory, asked for 2 KiB 500 ms",
        "512 600 B fits 1.00 s",
        "a note",
    ]


# -- cells ----------------------------------------------------------------------------------------------------

SETUP = """
import asyncio, weakref
watched = []
class Big: pass
def work(size, limit=100):
    global made
    mine = Big(); watched.append(weakref.ref(mine))
    if size > limit:
        bytearray(1 << 60)
    return size
def alive():
    return sum(ref() is not None for ref in watched)
"""


shared_kernel, notebook = tidied_kernel("%reset -f", "%reload_ext ipygpumem\n" + SETUP)
"""A kernel with the extension and ``work``, of which no size above 100 fits."""


def rows(reply: Any) -> list[list[str]]:
    """The rows of the table of tries: value and outcome."""
    (report,) = reply.reports("autofit")
    lines = report[report.index("autofit ·") :].splitlines()
    rule = next(number for number, line in enumerate(lines) if "──" in line)
    return [line.split() for line in lines[rule + 1 :] if line.startswith("   ")]


def test_a_cell_runs_until_it_fits_and_leaves_what_that_run_leaves(notebook: Kernel) -> None:
    reply = works(notebook, "%%autofit size=400\nbig = Big()\nif size == 400: only_first = 1\nwork(size)")
    assert (reply.result, reply.traceback, reply.stderr) == ("100", "", "")
    assert "autofit · size=100 fits · 3 tries" in reply.reports("autofit")[0]
    assert [row[0] for row in rows(reply)] == ["400", "200", "100"]
    assert notebook.value("size, type(big).__name__, 'only_first' in globals(), alive()") == (100, "Big", False, 0)
    assert notebook.value("_, ipygpumem.last().success if 'ipygpumem' in globals() else True") == (100, True)


def test_what_a_failed_try_shadowed_is_back_for_the_next(notebook: Kernel) -> None:
    works(notebook, "total = 7")
    works(notebook, "%%autofit size=400\ntotal = total + 1\nwork(size)")
    assert notebook.value("total") == 8


def test_what_a_failed_try_replaces_of_an_earlier_one_is_gone_before_the_next(notebook: Kernel) -> None:
    # Seen: each try's cycle stayed, since it was older than the try in which it became garbage.
    works(notebook, "import weakref\nclass Model:\n    def __init__(self): self.me, self.held = self, b'x' * 2**25")
    works(notebook, "class Trainer: pass\ntrainer, models, alive = Trainer(), [], []")
    code = "alive.append(sum(model() is not None for model in models))\ntrainer.model = Model()\n"
    code += "models.append(weakref.ref(trainer.model))\nif n > 4: raise MemoryError"
    works(notebook, "%%autofit n=64\n" + code)
    assert notebook.value("alive") == [0, 1, 1, 1, 1]


def test_the_value_may_start_from_the_variable_itself(notebook: Kernel) -> None:
    works(notebook, "size = 160")
    assert works(notebook, "%%autofit size --step 0.9\nwork(size)").result == "93"


def test_a_search_runs_the_cell_once_more_with_what_it_found(notebook: Kernel) -> None:
    reply = works(notebook, "runs = []")
    reply = works(notebook, "%%autofit size=128 --step search --headroom 0%\nruns.append(size)\nwork(size)")
    assert reply.result == "100"
    runs = notebook.value("runs")
    assert runs[-1] == 100
    assert {64, 96, 100, 101} <= set(runs)
    assert notebook.value("size") == 100


def test_a_whole_number_with_an_exponent_is_a_whole_number(notebook: Kernel) -> None:
    works(notebook, "%%autofit size=1e3 --min 1e1\nwork(size)")
    assert notebook.value("size, type(size).__name__") == (62, "int")


def test_await_prints_and_line_magics_work_in_the_body(notebook: Kernel) -> None:
    reply = works(
        notebook,
        "%%autofit size=200\nawait asyncio.sleep(0.01)\nprint('try', size)\nx = %sx echo hello\nwork(size)\n"
        "await asyncio.sleep(0, x)",
    )
    assert reply.stdout == "try 200\ntry 100\n"
    assert reply.result == "['hello']"
    assert works(notebook, "%%autofit size=200\nwork(size);").result is None
    assert works(notebook, "%%autofit size=200\ny = work(size)").result is None


def test_a_body_that_is_a_cell_magic_is_tried_again_too(notebook: Kernel) -> None:
    reply = works(notebook, "%%autofit size=200\n%%time\ny = work(size)")
    assert reply.stdout.count("Wall time") >= 1
    assert notebook.value("size, y") == (100, 100)


def test_a_body_whose_magic_shows_errors_itself_is_tried_again_too(notebook: Kernel) -> None:
    works(notebook, "%%autofit size=200\n%%capture out\nprint('try', size)\nwork(size)")
    assert notebook.value("size, out.stdout, alive()") == (100, "try 100\n", 0)


def test_another_error_is_shown_as_ever_and_stops(notebook: Kernel) -> None:
    plain = notebook.run("# first\n1 + 1\n[1 / 0]")
    reply = notebook.run("%%autofit size=50\n1 + 1\n[1 / 0]")
    assert (reply.status, reply.error, reply.message) == ("error", "ZeroDivisionError", "division by zero")
    lines = [re.sub(r"\x1b\[[\d;]*m", "", text.traceback).splitlines() for text in (reply, plain)]
    arrows = [[line for line in shown if line.startswith("---->")] for shown in lines]
    assert arrows == [["----> 3 [1 / 0]"]] * 2
    assert len(lines[0]) == len(lines[1])
    assert "size=50: ZeroDivisionError" in reply.reports("autofit")[0]


def test_nothing_fits_is_one_line_and_leaves_the_variable_as_it_was(notebook: Kernel) -> None:
    works(notebook, "size = 'mine'")
    reply = notebook.run("%%autofit size=3\nx = 1\nwork(1000)\nsize")
    assert (reply.status, reply.traceback) == ("error", "")
    assert reply.stderr.startswith("UsageError: %%autofit: even size=1 does not fit (out of memory): it needs at least")
    assert [row[0] for row in rows(reply)] == ["3", "1"]
    assert notebook.value("size, 'x' in globals(), alive()") == ("mine", False, 0)


def test_nothing_fits_in_an_experiment_before_any_traceback_was_shown(kernel: Kernel) -> None:
    reply = kernel.run("%%experiment a\n%%autofit size=2\nbytearray(1 << 60)\nsize")
    assert reply.stderr.startswith("UsageError: %%autofit: even size=1 does not fit")
    assert "AttributeError" not in reply.reports("experiment")[0]


def test_an_interrupt_in_the_third_try_leaves_what_it_leaves_in_a_plain_cell(notebook: Kernel) -> None:
    works(notebook, "from tests.waiting import announce; bound = 'old'")
    reply = notebook.run(
        "%%autofit size=800\nbound = size\nif size == 200:\n    held = Big(); watched.append(weakref.ref(held))\n"
        "    announce()\nwork(size)",
        interrupt_when="waits here",
    )
    assert reply.error == "KeyboardInterrupt"
    assert notebook.value("size, bound, alive()") == (200, 200, 1)
    assert "size=200: KeyboardInterrupt · 3 tries" in reply.reports("autofit")[0]
    works(notebook, "del held")
    assert works(notebook, "%%autofit size=400\nwork(size)").result == "100"


def test_an_interrupt_while_a_failed_try_is_taken_back_loses_no_name(notebook: Kernel) -> None:
    works(
        notebook,
        "import _thread\nold = 'old'\n"
        "class Bomb:\n    __del__ = staticmethod(_thread.interrupt_main)  # strikes after the finaliser, in our code",
    )
    reply = notebook.run("%%autofit size=400\nbomb = Bomb()\na = 1\nold = 'new'\nz = 2\nwork(size)")
    assert reply.error == "KeyboardInterrupt"
    assert notebook.value("old, {'a', 'z', 'bomb'} & set(globals()), alive()") == ("old", set(), 0)
    assert works(notebook, "%%autofit size=400\nwork(size)").result == "100"


def test_inside_an_experiment_the_variable_is_the_experiments(notebook: Kernel) -> None:
    works(notebook, "size = 'mine'")
    reply = works(notebook, "%%experiment a --keep found\n%%autofit size=400\nfound = work(size)\nmore = Big()\nfound")
    assert reply.result == "100"
    assert notebook.value("size, found, 'more' in globals()") == ("mine", 100, False)
    assert len(reply.reports("experiment")) == 1


def test_around_an_experiment_each_try_is_one(notebook: Kernel) -> None:
    works(notebook, "import ipygpumem")
    reply = works(notebook, "%%autofit size=400\n%%experiment b --keep found\nfound = work(size)\nmore = Big()\nfound")
    assert reply.result == "100"
    assert notebook.value("size, found, 'more' in globals()") == (100, 100, False)
    assert notebook.value("[(e.name, e.ooms) for e in ipygpumem.experiments()]") == [("b", 1), ("b", 1), ("b", 0)]
    assert len(reply.reports("experiment")) == 1


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("%%autofit nothing\nwork(1)", "there is no variable 'nothing'"),
        ("%%autofit work\nwork(1)", "work is a function"),
        ("%%autofit size=big\nwork(1)", "size: 'big' is not a number"),
        ("%%autofit 3=4\nwork(1)", "'3=4' is not a variable"),
        ("%%autofit size=4 --min 8\nwork(1)", "the minimum of size is 8, above its start 4"),
        ("%%autofit size=4 --min other=8\nwork(1)", "the minimum of other"),
        ("%%autofit size=4 --step up\nwork(1)", "write halve, search, or a factor"),
        ("%%autofit\nwork(1)", "which variable? For instance: %%autofit batch_size=1024"),
        ("%%autofit size=4\n", "the cell is empty"),
        ("%%autofit size=4\n%%autofit other=4\nwork(1)", "an autofit is running already"),
        ("%autofit size=4", "write %%autofit as the first line of a cell"),
        ("%%autofit size=400\nsize = 300\nwork(size)", "the cell sets size itself"),
    ],
)
def test_a_mistake_is_one_line(notebook: Kernel, code: str, said: str) -> None:
    reply = notebook.run(code)
    assert (reply.status, reply.traceback) == ("error", ""), reply
    assert reply.stderr.startswith("UsageError: "), reply.stderr
    assert said in reply.stderr
    assert notebook.value("'size' in globals()") is False


def test_an_autofit_of_a_function_in_a_cell_that_is_fitted_is_an_error(notebook: Kernel) -> None:
    reply = notebook.run("%%autofit size=4\nimport ipygpumem\nipygpumem.autofit(work, size=400)")
    assert (reply.error, reply.message) == (
        "AutofitError",
        "this cell runs under %%autofit already: reduce both variables with one of the two",
    )


def test_a_traceback_shows_the_users_frames_and_no_way_through_ours(notebook: Kernel) -> None:
    reply = notebook.run(
        "import ipygpumem\ndef fails(size):\n    raise KeyError(size)\nipygpumem.autofit(fails, size=4)"
    )
    assert reply.error == "KeyError"
    assert "ipygpumem/" not in reply.traceback.replace("\\", "/")
    reply = notebook.run("ipygpumem.autofit(work, nothing=4)")
    assert reply.traceback.count("ipygpumem/") == 1  # where it is raised: IPython hides no last frame


def test_a_cell_that_does_not_use_the_variable_or_binds_it_is_reported(notebook: Kernel) -> None:
    unused = works(notebook, "%%autofit size=4\nwork(1)").reports("autofit")[0]
    assert "the cell does not use size" in unused
    bound = works(notebook, "%%autofit size=4\nsize = 3").reports("autofit")[0]
    assert "the cell has set size itself" in bound


def test_code_that_a_loop_would_allow_is_still_an_error(notebook: Kernel) -> None:
    for word in ("break", "continue"):
        reply = notebook.run(f"%%autofit size=4\n{word}")
        assert reply.error == "SyntaxError"
    works(notebook, "%%autofit size=4\nfrom __future__ import annotations\nx: nowhere = size")


def test_a_function_is_fitted_in_a_notebook_by_the_sessions_meter(notebook: Kernel) -> None:
    works(notebook, "import ipygpumem\nfound = ipygpumem.autofit(work, size=400)")
    assert notebook.value("found.values, found.result, len(found.tries), alive()") == ({"size": 100}, 100, 3, 0)


def test_the_line_completes(notebook: Kernel) -> None:
    works(notebook, "batch_size = 8")
    offered = notebook.complete("%%autofit ba")
    assert "batch_size" in offered
    assert "search" in notebook.complete("%%autofit n=8 --step ")


def test_the_magic_can_be_called_from_code_as_well(shell: InteractiveShell) -> None:
    shell.run_line_magic("load_ext", "ipygpumem")
    shell.run_cell_magic("autofit", "n=8", "if n > 3:\n    raise MemoryError\nm = n")
    assert (shell.user_ns["n"], shell.user_ns["m"]) == (2, 2)
