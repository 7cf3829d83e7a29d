"""Autofit: which values are tried, what counts as fitting, functions in scripts, and cells without
torch.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ipygpumem
from benchmarks.harness.kernel import Kernel
from ipygpumem.errors import AutofitError
from ipygpumem.estimating.records import FITS
from ipygpumem.fitting import budgets
from ipygpumem.fitting.budgets import Budget
from ipygpumem.fitting.fit import (
    CROWDED,
    OUT_OF_MEMORY,
    OVER,
    Fit,
    Try,
    crowded_device,
    failed_device,
)
from ipygpumem.fitting.functions import run_tries
from ipygpumem.fitting.plan import Plan
from ipygpumem.meter.meter import Meter
from ipygpumem.reclaim.failure import Failure
from ipygpumem.records import Usage
from ipygpumem.report import text
from ipygpumem.report.autofit import autofit_report
from tests.fake_cuda_limits import TEXT as REFUSED
from tests.fakes import FakeProbe
from tests.steps import existing_names, plain, run_cells, tidied_kernel

pytestmark = pytest.mark.usefixtures("others_out_of_sight")


def tried(start: dict[str, Any], fits: Callable[..., bool], **options: Any) -> list[Any]:
    """Return the values that a plan tries if ``fits`` decides: plain numbers for one variable."""
    plan = Plan(start, **options)
    values = []
    while True:
        values.append(
            tuple(plan.values.values()) if len(start) > 1 else next(iter(plan.values.values()))
        )
        if not plan.record_outcome(fits=fits(**plan.values)):
            return values


@pytest.mark.parametrize(
    ("start", "largest", "options", "values"),
    [
        (1024, 200, {}, [1024, 512, 256, 128]),
        (7, 0, {}, [7, 3, 1]),
        (
            2048,
            1,
            {},
            [2048 >> turn for turn in range(11)],
        ),  # ten tries after the first are the most
        (8, 0, {"max_tries": 0}, [8]),
        (100, 0, {"smallest": 30}, [100, 50, 30]),
        (100, 70, {"step": 0.9}, [100, 90, 81, 72, 64]),
        (4, 0, {"step": "0.9"}, [4, 3, 2, 1]),
        (0.8, 0.15, {}, [0.8, 0.4, 0.2, 0.1]),
        (8.0, 0, {"smallest": 0.5}, [8.0, 4.0, 2.0, 1.0, 0.5]),
        (1e3, 0, {}, [1000, 500, 250, 125, 62, 31, 15, 7, 3, 1]),  # whole, although a float
        (1024, 700, {"step": "search", "max_tries": 3}, [1024, 512, 768, 640]),
        (1024, 600, {"step": "search", "max_tries": 3}, [1024, 512, 768, 640, 512]),
        (1024, 0, {"step": "search", "max_tries": 2}, [1024, 512, 256]),
    ],
)
def test_one_variable_is_reduced(
    start: float, largest: float, options: dict[str, Any], values: list[float]
) -> None:
    tries = tried({"n": start}, lambda n: n <= largest, **options)
    assert tries == values
    assert {type(value) for value in tries} == {type(start)}


def test_a_search_ends_with_the_largest_fitting_value() -> None:
    for largest in range(1, 1025):
        values = tried({"n": 1024}, lambda n, most=largest: n <= most, step="search")
        assert values[-1] == largest
        assert len(set(values)) >= len(values) - 1
    values = tried({"share": 1.0}, lambda share: share <= 0.61, step="search")
    assert 0.6 <= values[-1] <= 0.61
    # A search by halves, not one step after the other.
    assert len(values) < 12


@pytest.mark.parametrize("name", ["batch_size", "train_batch", "bs", "BATCH", "micro_bs"])
def test_a_batch_ends_on_a_multiple_of_eight(name: str) -> None:
    """Unless fewer than eight rows fit, or the user's start does."""
    for largest in [*range(1, 300), 511, 1000]:
        values = tried({name: 1000}, lambda most=largest, **n: n[name] <= most, step="search")
        if largest == 1000:
            assert values == [1000]
        elif largest >= 8:
            assert values[-1] == largest // 8 * 8
        else:
            assert values[-1] == largest


def test_a_halved_batch_stays_a_multiple_of_eight() -> None:
    values = tried({"batch_size": 1000}, lambda batch_size: False)
    assert values == [1000, 496, 248, 120, 56, 24, 8, 4, 2, 1]
    values = tried({"batch_size": 100}, lambda batch_size: False, smallest=30)
    assert values == [100, 48, 30]


def test_a_search_for_a_large_batch_stops_early() -> None:
    """Within a sixty-fourth of the largest that fits."""
    for largest in (5000, 40_000, 65_535):
        values = tried({"batch": 65_536}, lambda batch, most=largest: batch <= most, step="search")
        # A batch is a multiple of 8.
        assert largest - largest // 64 - 8 <= values[-1] <= largest
        assert values[-1] % 8 == 0
        assert len(values) <= 12


def test_a_value_that_no_longer_fits_is_halved() -> None:
    outcomes = iter([False, True, False, False, False, False, True])
    assert tried({"n": 8}, lambda n: next(outcomes), step="search") == [8, 4, 6, 5, 4, 2, 1]


def test_several_variables_are_reduced_in_turn_to_their_minimums() -> None:
    values = tried(
        {"batch": 8, "length": 64},
        lambda batch, length: batch * length <= 40,
        smallest={"length": 16},
    )
    assert values == [(8, 64), (4, 64), (4, 32), (2, 32), (2, 16)]
    everything = tried(
        {"batch": 2, "length": 64}, lambda batch, length: False, smallest={"length": 16}
    )
    assert everything == [(2, 64), (1, 64), (1, 32), (1, 16)]


def test_a_search_raises_several_variables_one_after_another() -> None:
    values = tried(
        {"batch": 8, "length": 64},
        lambda batch, length: batch * length <= 40,
        step="search",
        max_tries=20,
    )
    down = values[:5]
    batch = values[5:7]
    length = values[7:]
    assert down == [(8, 64), (4, 64), (4, 32), (2, 32), (2, 16)]
    assert batch == [(5, 16), (3, 16)]  # 3 × 16 is too much, so 2 stays
    assert length == [(2, 24), (2, 20), (2, 22), (2, 21), (2, 20)]  # 32 failed beside 2 before


def test_a_search_without_tries_left_says_that_more_may_fit() -> None:
    plan = Plan({"batch": 8, "length": 8}, step="search", max_tries=3)
    while plan.record_outcome(fits=plan.values["length"] <= 5):
        pass
    assert (plan.values, plan.exhausted) == ({"batch": 6, "length": 4}, True)
    report = text.render([autofit_report([Try(plan.values, "fits", 1.0, ())], [], plan)])
    assert "all tries are used up: larger values may fit, too" in report


def test_numbers_of_numpy_and_tiny_shares_are_accepted() -> None:
    numpy = pytest.importorskip("numpy")
    plan = Plan({"n": 8}, step=numpy.float64(0.5), max_tries=numpy.int64(3), headroom=0.00005)
    assert plan.headroom == 0.00005
    assert Plan({"n": 8}, headroom=numpy.float32(0.25)).headroom == 0.25


@pytest.mark.parametrize(
    ("start", "options", "said"),
    [
        ({}, {}, "needs a variable"),
        ({"n": "8"}, {}, "n is '8': autofit reduces finite numbers"),
        ({"n": True}, {}, "n is an object of type bool"),
        ({"n": 0}, {}, "start from a positive number"),
        ({"n": float("nan")}, {}, "n is nan: autofit reduces finite numbers"),
        ({"n": 10**5000}, {}, "n is a number of 16610 bits: autofit reduces finite numbers"),
        ({"n": 8}, {"min": 9}, "the minimum of n is 9, above its start 8"),
        ({"n": 8}, {"min": -1}, "below 0"),
        ({"n": 8}, {"min": {"m": 1}}, "the minimum of m: there is no variable of that name"),
        ({"n": 8}, {"min": "x"}, "the minimum of n is 'x'"),
        ({"n": 8}, {"step": "0.9x"}, "write halve, search, or a factor"),
        ({"n": 8}, {"step": 1.5}, "write halve, search, or a factor"),
        ({"n": 8}, {"max_tries": -1}, r"max_tries .* -1 is not a whole number of 0 or more"),
        ({"n": 8}, {"headroom": "lots"}, "write a share"),
        ({"n": 8}, {"headroom": 1.2}, "write a share"),
    ],
)
def test_autofit_refuses_contradictory_arguments(
    start: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(AutofitError, match=said):
        ipygpumem.autofit(lambda **values: None, **{"min": None, **options}, **start)


def usage(device: str, peak: int, *, before: int = 0, **more: Any) -> Usage:
    return Usage(device, before, before, peak, 1000, "allocator", **more)


def test_headroom_counts_all_memory_in_use_on_the_device() -> None:
    beside = {"reserved_bytes": 400, "used_bytes": 600}  # 200 are others' and the context's
    assert crowded_device([usage("cuda:0", 750, **beside)], 0.05) is None
    assert crowded_device([usage("cuda:0", 751, **beside)], 0.05) == "cuda:0"
    assert crowded_device([usage("cuda:0", 999, **beside)], 0.0) is None


def test_the_host_counts_where_no_accelerator_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    host = usage("cpu", 500, before=100)
    for available, crowded in ((699, "cpu"), (800, None)):  # 201 are others'
        monkeypatch.setattr("ipygpumem.fitting.fit.available_bytes", lambda size=available: size)
        assert crowded_device([host], 0.3) == crowded
        assert crowded_device([host, usage("cuda:0", 10)], 0.3) is None


def test_a_budget_takes_the_devices_place(in_force: Callable[[int], Budget]) -> None:
    in_force(550)
    assert crowded_device([usage("cuda:0", 495, used_bytes=900, reserved_bytes=0)], 0.1) is None
    assert crowded_device([usage("cuda:0", 496)], 0.1) == "cuda:0"


@pytest.fixture
def in_force(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Budget]:
    """Let a budget of so many bytes of cuda:0 be in force."""

    def put(size: int) -> Budget:
        budget = Budget({"gpu": size})
        budget.limits["cuda:0"] = size
        monkeypatch.setattr(budgets, "in_force", [budget])
        return budget

    return put


@pytest.mark.parametrize(
    ("error", "message", "device"),
    [
        (
            "OutOfMemoryError",
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total",
            "cuda:1",
        ),
        (
            "OutOfMemoryError",
            "Allocation on device 1 would exceed allowed memory. (out of memory)",
            "cuda:1",
        ),
        (
            "RuntimeError",
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
            "cpu",
        ),
        ("MemoryError", "", "cpu"),
        ("RuntimeError", "UR_RESULT_ERROR_OUT_OF_HOST_MEMORY: HOST_ALLOCATION_FAILED", "cpu"),
        (
            "OutOfMemoryError",
            "CUDA out of memory. Tried to allocate 4.00 TiB. GPU 2 has a total",
            "cuda:2",
        ),
        (
            "RuntimeError",
            "HIP out of memory. Tried to allocate 20.00 MiB (GPU 3; 1.00 GiB total)",
            "cuda:3",
        ),
        (
            "OutOfMemoryError",
            "XPU out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total",
            "xpu:1",
        ),
        ("RuntimeError", "MPS backend out of memory (MPS allocated: 8.00 GB).", "mps"),
        (
            "OutOfMemoryError",
            "Out of memory allocating 8,192 bytes (allocated so far: 0 bytes).",
            "cupy:1",
        ),
        (
            "XlaRuntimeError",
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes",
            "cpu",
        ),
    ],
)
def test_the_device_that_ran_out_is_read_from_the_error(
    error: str, message: str, device: str
) -> None:
    usages = [usage("cpu", 10), usage("cuda:0", 100), usage("cuda:1", 50), usage("cupy:1", 0)]
    assert failed_device(Failure("oom", error, message), usages) == device


class Big:
    """Object that a test follows with a weak reference."""


def test_a_failed_call_is_freed_before_the_next_call(meter: Meter) -> None:
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

    # The handled error would keep what was made before it, as a context.
    try:
        raise ValueError("the context of all that follows")
    except ValueError:
        run_tries(train, Fit(Plan({"n": 8}), meter))

    # Two calls fail, each with two big objects; the third fits.
    assert len(alive) == 4
    assert seen == [0, 0, 0]


def test_another_error_stops_at_once_and_keeps_its_frames(meter: Meter) -> None:
    calls = []

    def train(n: int) -> None:
        calls.append(n)
        if n < 8:
            raise ValueError(f"not {n}")
        raise MemoryError

    with pytest.raises(ValueError, match="not 4") as caught:
        run_tries(train, Fit(Plan({"n": 8}), meter))
    assert calls == [8, 4]
    assert caught.traceback[-1].frame.f_locals["n"] == 4


NEEDS_AT_LEAST = ": it needs at least"


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (
            "can't allocate memory: you tried to allocate 500 bytes",
            f"{NEEDS_AT_LEAST} 1.2 KiB of RAM, which has 1000 B",
        ),
        ("not enough memory: you tried", ""),  # its size is unknown
        # A device on which nothing lies: that is not said of RAM.
        (
            "CUDA out of memory. Tried to allocate 4.00 TiB. GPU 1 has",
            f"{NEEDS_AT_LEAST} 4.00 TiB of cuda:1",
        ),
        ("CUDA error: out of memory", " on cuda:0"),
    ],
)
def test_a_search_without_a_fit_says_how_much_is_needed(message: str, what: str) -> None:
    probe = FakeProbe()
    meter = Meter([probe])
    probe.set(300)

    def train(n: int) -> None:
        probe.spike(700)
        raise RuntimeError(message if "CUDA" in message else f"DefaultCPUAllocator: {message}")

    with pytest.raises(AutofitError) as caught:
        run_tries(train, Fit(Plan({"n": 2}), meter))
    assert str(caught.value) == f"even n=1 does not fit (out of memory){what}"
    meter.close()


def test_only_the_last_run_of_a_search_may_use_the_headroom() -> None:
    probe = FakeProbe("cuda:0")
    meter = Meter([probe])
    calls = []

    def train(n: int) -> int:
        probe.spike(n + 200 * (n in calls))
        calls.append(n)
        return n

    result = run_tries(
        train, Fit(Plan({"n": 1000}, step="search", max_tries=2, headroom=0.1), meter)
    )
    outcomes = [(item.values["n"], item.outcome, item.device) for item in result.tries]
    assert outcomes == [(1000, CROWDED, "cuda:0"), (500, FITS, None), (750, FITS, None)]

    # As if 875 had run before: it now needs 200 more, and the search goes back to 750.
    calls[:] = [875]
    result = run_tries(
        train, Fit(Plan({"n": 1000}, step="search", max_tries=3, headroom=0.1), meter)
    )
    assert [(item.values["n"], item.outcome) for item in result.tries][-2:] == [
        (875, CROWDED),
        (750, FITS),
    ]

    # Even the smallest size leaves too little headroom.
    with pytest.raises(AutofitError) as caught:
        run_tries(train, Fit(Plan({"n": 1000}, step="search", smallest=990, headroom=0.1), meter))
    said = (
        "even n=990 does not fit (too little headroom): it needs 990 B of cuda:0 plus the 10% that "
        "must stay free"
    )
    assert str(caught.value) == said
    meter.close()


def test_a_try_that_a_budget_refused_is_over_it(in_force: Callable[[int], Budget]) -> None:
    probe = FakeProbe("cuda:0")
    meter = Meter([probe])

    class OutOfMemoryError(RuntimeError): ...

    def train(n: int) -> None:
        probe.spike(9)
        raise OutOfMemoryError(REFUSED)

    for size, outcome in (((1 << 30) - 1, OVER), (4 << 30, OUT_OF_MEMORY)):
        in_force(size)
        fit = Fit(Plan({"n": 2}, max_tries=0), meter)
        with pytest.raises(AutofitError, match=r"of cuda:0, but only 1\.00 GiB is allowed"):
            run_tries(train, fit)
        assert (fit.tries[-1].outcome, fit.tries[-1].limit_bytes) == (outcome, 1 << 30)
    meter.close()


def test_a_function_that_cannot_be_fitted_is_an_error() -> None:
    async def awaits(n: int) -> int:
        return n

    def yields(n: int) -> Iterator[int]:
        yield n

    for function, said in (
        (awaits, "runs nothing when it is called"),
        (yields, "runs nothing when it is called"),
        (lambda size: None, "takes no argument 'n'"),
        (lambda n: ipygpumem.autofit(lambda m: m, m=4), "an autofit is already running"),
    ):
        with pytest.raises(AutofitError, match=said):
            ipygpumem.autofit(function, n=8)


def test_the_decorator_returns_the_result_and_reports_the_fit() -> None:
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


def _first(batch_size: int, name: str, epochs: int = 1) -> tuple[object, ...]:
    return batch_size, name, epochs


class Trainer:
    def train(self, batch_size: int, name: str) -> tuple[object, ...]:
        assert type(self) is Trainer
        return batch_size, name

    fitting = ipygpumem.autofit(batch_size=16)(train)


@pytest.mark.parametrize(
    ("function", "args", "options", "expected"),
    [
        (_first, ("m",), {}, (16, "m", 1)),
        (_first, ("m", 3), {}, (16, "m", 3)),
        (_first, ("m",), {"epochs": 3, "batch_size": 4}, (4, "m", 3)),
        (lambda name, batch_size, epochs=1: (batch_size, name, epochs), ("m", 3), {}, (16, "m", 3)),
        (
            lambda batch_size, name, /, *more: (batch_size, name, *more),
            ("m", 5, 6),
            {},
            (16, "m", 5, 6),
        ),
        (lambda *name, batch_size: (batch_size, *name), ("m", "n"), {}, (16, "m", "n")),
        (
            functools.wraps(_first)(lambda **values: _first(**values)),
            (),
            {"name": "m"},
            (16, "m", 1),
        ),
    ],
)
def test_positional_arguments_leave_out_the_fitted_variable(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
    expected: tuple[object, ...],
) -> None:
    assert ipygpumem.autofit(batch_size=16)(function)(*args, **options) == expected


def test_a_decorated_method_is_called_as_any_other() -> None:
    assert Trainer().fitting("m") == (16, "m")
    with pytest.raises(
        AutofitError,
        match=r"Trainer\.train: autofit gives batch_size: leave it out, or write batch",
    ):
        Trainer().fitting(8, "m")
    with pytest.raises(AutofitError, match=r"test_a_dec.*<lambda> takes no argument 'batch_size'"):
        ipygpumem.autofit(batch_size=16)(lambda name: name)("m")


SETUP = """
import asyncio, ipygpumem, weakref
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


shared_kernel, notebook = tidied_kernel(
    "%reset -f", "%reload_ext ipygpumem\n" + SETUP, hides_libraries=True
)
"""A kernel with the extension and ``work``, of which no size above 100 fits."""


def rows(reply: Any) -> list[str]:
    """The values in the table of tries."""
    (report,) = reply.reports("autofit")
    lines = report[report.index("autofit ·") :].splitlines()
    rule = next(number for number, line in enumerate(lines) if "──" in line)
    return [line.split()[0] for line in lines[rule + 1 :] if line.startswith("   ")]


def test_a_cell_leaves_only_the_names_of_its_fitting_run(notebook: Kernel) -> None:
    run_cells(notebook, "total = 7")
    code = """\
%%autofit size=400
big = Big()
if size == 400: only_first = 1
total = total + 1
work(size)"""

    # As a cell.
    reply = run_cells(notebook, code)
    assert reply.result == "100"
    assert reply.traceback == ""
    assert reply.stderr == ""
    assert "autofit · size=100 fits · 3 tries" in reply.reports("autofit")[0]
    assert rows(reply) == ["400", "200", "100"]
    assert notebook.value("{'size': size, 'total': total}") == {"size": 100, "total": 8}
    assert notebook.value("type(big).__name__") == "Big"
    assert existing_names(notebook, "only_first") == []
    assert notebook.value("alive()") == 0
    assert notebook.value("_, ipygpumem.last().success") == (100, True)

    # As a call.
    run_cells(notebook, "found = ipygpumem.autofit(work, size=400)")
    assert notebook.value("found.values") == {"size": 100}
    assert notebook.value("found.result") == 100
    assert notebook.value("len(found.tries)") == 3
    assert notebook.value("alive()") == 0


def test_values_replaced_by_a_failed_try_die_before_the_next_try(notebook: Kernel) -> None:
    # Seen: each try's cycle stayed, since it was older than the try in which it became garbage.
    run_cells(
        notebook,
        """
        class Model:
            def __init__(self): self.me, self.held = self, b'x' * 2**25
        """,
    )
    run_cells(
        notebook,
        """
        class Trainer: pass
        trainer, models, alive = Trainer(), [], []
        """,
    )
    code = "alive.append(sum(model() is not None for model in models))\ntrainer.model = Model()\n"
    code += "models.append(weakref.ref(trainer.model))\nif n > 4: raise MemoryError"
    run_cells(notebook, "%%autofit n=64\n" + code)
    assert notebook.value("alive") == [0, 1, 1, 1, 1]


def test_autofit_steps_from_the_given_or_current_value(notebook: Kernel) -> None:
    run_cells(notebook, "size = 160")
    assert run_cells(notebook, "%%autofit size --step 0.9\nwork(size)").result == "93"
    run_cells(
        notebook,
        """
        %%autofit size=1e3 --min 1e1
        work(size)
        """,
    )
    assert notebook.value("size, type(size).__name__") == (62, "int")
    run_cells(notebook, "runs = []")
    reply = run_cells(
        notebook,
        """
        %%autofit size=128 --step search --headroom 0%
        runs.append(size)
        work(size)
        """,
    )
    runs = notebook.value("runs")
    assert reply.result == "100"
    assert runs[-1] == 100
    assert notebook.value("size") == 100
    assert {64, 96, 100, 101} <= set(runs)
    offered = notebook.complete("%%autofit si")
    assert "size" in offered
    assert "search" in notebook.complete("%%autofit n=8 --step ")


def test_await_prints_and_magics_work_in_the_body(notebook: Kernel) -> None:
    reply = run_cells(
        notebook,
        """
        %%autofit size=200
        await asyncio.sleep(0.01)
        print('try', size)
        x = %sx echo hello
        work(size)
        await asyncio.sleep(0, x)
        """,
    )
    assert (reply.stdout, reply.result) == ("try 200\ntry 100\n", "['hello']")
    assert run_cells(notebook, "%%autofit size=200\nwork(size);").result is None
    assert run_cells(notebook, "%%autofit size=200\ny = work(size)").result is None
    assert (
        "Wall time"
        in run_cells(
            notebook,
            """
            %%autofit size=200
            %%time
            y = work(size)
            """,
        ).stdout
    )
    assert notebook.value("size, y") == (100, 100)
    # A magic that shows the error itself.
    run_cells(
        notebook,
        """
        %%autofit size=200
        %%capture out
        print('try', size)
        work(size)
        """,
    )
    assert notebook.value("size, out.stdout, alive()") == (100, "try 100\n", 0)


def test_another_error_is_shown_as_usual_and_ends_autofit(notebook: Kernel) -> None:
    bare = notebook.run("""
    # first
    1 + 1
    [1 / 0]
    """)
    reply = notebook.run("""
    %%autofit size=50
    1 + 1
    [1 / 0]
    """)
    assert reply.status == "error"
    assert reply.error == "ZeroDivisionError"
    assert reply.message == "division by zero"
    lines = [plain(each.traceback).splitlines() for each in (reply, bare)]
    arrows = [[line for line in shown if line.startswith("---->")] for shown in lines]
    assert arrows == [["----> 3 [1 / 0]"]] * 2
    assert len(lines[0]) == len(lines[1])
    assert "size=50: ZeroDivisionError" in reply.reports("autofit")[0]
    for word in ("break", "continue"):  # which the loop would allow
        assert notebook.run(f"%%autofit size=4\n{word}").error == "SyntaxError"
    run_cells(
        notebook,
        """
        %%autofit size=4
        from __future__ import annotations
        x: nowhere = size
        """,
    )


def test_a_search_without_a_fit_leaves_the_variable_unchanged(notebook: Kernel) -> None:
    run_cells(notebook, "size = 'mine'")
    reply = notebook.run("""
    %%autofit size=3
    x = 1
    work(1000)
    size
    """)
    assert (reply.status, reply.traceback) == ("error", "")
    assert reply.stderr.startswith(
        "UsageError: %%autofit: even size=1 does not fit (out of memory)\n"
    )
    assert rows(reply) == ["3", "1"]
    assert notebook.value("size, 'x' in globals(), alive()") == ("mine", False, 0)


def test_an_autofit_without_a_fit_works_before_any_traceback(kernel: Kernel) -> None:
    reply = kernel.run("""
    %%experiment a
    %%autofit size=2
    bytearray(1 << 60)
    size
    """)
    assert reply.stderr.startswith("UsageError: %%autofit: even size=1 does not fit")
    assert "AttributeError" not in reply.reports("experiment")[0]


def test_an_interrupt_during_the_rollback_of_a_try_loses_no_name(notebook: Kernel) -> None:
    run_cells(
        notebook,
        """
        import _thread
        old = 'old'
        class Bomb:
            # It strikes after the finaliser, in our code.
            __del__ = staticmethod(_thread.interrupt_main)
        """,
    )
    # %%capture runs a cell of its own, whose events lose the interrupt.
    for head in ("", "%%capture\n"):
        reply = notebook.run(
            f"%%autofit size=400\n{head}bomb = Bomb()\na = 1\nold = 'new'\nz = 2\nwork(size)"
        )
        assert (reply.error, "Exception ignored" in reply.stderr) == ("KeyboardInterrupt", False)
        assert notebook.value("old, {'a', 'z', 'bomb'} & set(globals()), alive()") == (
            "old",
            set(),
            0,
        )
    assert run_cells(notebook, "%%autofit size=400\nwork(size)").result == "100"


def test_autofit_works_inside_and_around_experiments(notebook: Kernel) -> None:
    run_cells(notebook, "size = 'mine'")
    reply = run_cells(
        notebook,
        """
        %%experiment a --keep found
        %%autofit size=400
        found = work(size)
        more = Big()
        found
        """,
    )
    assert (reply.result, len(reply.reports("experiment"))) == ("100", 1)
    assert notebook.value("size, found, 'more' in globals()") == ("mine", 100, False)
    reply = run_cells(
        notebook,
        """
        %%autofit size=400
        %%experiment b --keep found
        found = work(size)
        more = Big()
        found
        """,
    )
    assert (reply.result, len(reply.reports("experiment"))) == ("100", 1)
    assert notebook.value("size, found, 'more' in globals()") == (100, 100, False)
    assert notebook.value("[(e.name, e.ooms) for e in ipygpumem.experiments()]")[-3:] == [
        ("b", 1),
        ("b", 1),
        ("b", 0),
    ]


def test_a_traceback_of_autofit_shows_only_the_users_frames(notebook: Kernel) -> None:
    reply = notebook.run(
        """
        def fails(size):
            raise KeyError(size)
        ipygpumem.autofit(fails, size=4)
        """
    )
    assert reply.error == "KeyError"
    assert "ipygpumem/" not in reply.traceback.replace("\\", "/")
    reply = notebook.run("ipygpumem.autofit(work, nothing=4)")
    assert "ipygpumem.autofit(work" in reply.traceback.replace("\x1b[43m", "")
    assert "ipygpumem/" not in reply.traceback.replace("\\", "/")
    reply = notebook.run("""
    %%autofit size=4
    ipygpumem.autofit(work, size=400)
    """)
    assert (reply.error, reply.message[:29]) == ("AutofitError", "an autofit is already running")


def test_a_cell_that_ignores_or_rebinds_the_variable_is_reported(notebook: Kernel) -> None:
    unused = run_cells(notebook, "%%autofit size=4\nwork(1)").reports("autofit")[0]
    assert "the cell does not use size" in unused
    bound = run_cells(notebook, "%%autofit size=4\nglobals()['size'] = 3").reports("autofit")[0]
    assert "the cell has set size itself" in bound
