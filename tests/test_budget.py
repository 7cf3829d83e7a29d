"""Budgets: what torch's allocator is told and told back, and the host's crossing, told with its cell."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import ipygpumem
from ipygpumem.errors import BudgetError
from ipygpumem.fitting import device_limits
from ipygpumem.fitting.budgets import Budget, checked, parse_budget
from ipygpumem.fitting.device_limits import DeviceLimits
from ipygpumem.measuring.meter import Meter
from ipygpumem.notebook.notebook import notebook_of
from tests.fakes import FakeProbe
from tests.kernel import Kernel
from tests.steps import works

GIB = 1 << 30


class LimitedCuda:
    """``torch.cuda`` with two devices of 16 GiB, as far as limits go."""

    def __init__(self, *, reserved: tuple[int, ...] = (0, 0), live: int = 0, fixed: int = 0) -> None:
        self.fractions = [1.0, 1.0]
        self.current = 0
        self.emptied = 0
        self._reserved = list(reserved)
        self._live = live
        self._fixed = max(fixed, live)
        """What stays reserved when the cache is emptied."""

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return self.current

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        yield
        self.current = before

    def memory_reserved(self, device: int | str) -> int:
        return self._reserved[int(str(device)[-1])]

    def memory_allocated(self, device: int | str) -> int:
        return self._live

    def empty_cache(self) -> None:
        self.emptied += 1
        self._reserved = [min(size, self._fixed) for size in self._reserved]

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(total_memory=16 * GIB)

    def set_per_process_memory_fraction(self, fraction: float, index: int) -> None:
        assert type(fraction) is float
        assert 0 <= fraction <= 1
        self.fractions[index] = fraction
        self.current = index  # as torch did before it had a guard here


class KnowingCuda(LimitedCuda):
    """That of torch 2.8 and later."""

    def get_per_process_memory_fraction(self, index: int) -> float:
        return self.fractions[index]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Let budgets see this ``torch.cuda``."""
    return lambda cuda: monkeypatch.setattr(device_limits, "_cuda", lambda: cuda)


@pytest.fixture
def meter() -> Iterator[Meter]:
    meter = Meter([FakeProbe()])
    yield meter
    meter.close()


def test_the_limit_is_set_and_what_was_set_before_is_back(use: Callable[[Any], None], meter: Meter) -> None:
    cuda = KnowingCuda()
    cuda.fractions = [0.75, 1.0]
    use(cuda)
    with Budget({"gpu": 8 * GIB}, meter) as budget:
        assert cuda.fractions == [0.5, 1.0]
        assert budget.limits == {"cuda:0": 8 * GIB}
    assert cuda.fractions == [0.75, 1.0]


def test_it_is_back_after_an_error_as_well(use: Callable[[Any], None], meter: Meter) -> None:
    cuda = KnowingCuda()
    use(cuda)
    seen = []

    def fail() -> None:
        with Budget({"gpu": 8 * GIB}, meter):
            seen.append(cuda.fractions[0])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen == [0.5]
    assert cuda.fractions == [1.0, 1.0]


def test_each_device_in_use_and_the_current_one_are_limited(use: Callable[[Any], None], meter: Meter) -> None:
    cuda = KnowingCuda(reserved=(0, 5))
    use(cuda)
    with Budget({"gpu": 8 * GIB, "cuda:1": 4 * GIB}, meter):
        assert cuda.fractions == [0.5, 0.25]
    assert cuda.fractions == [1.0, 1.0]


@pytest.mark.parametrize("kind", [LimitedCuda, KnowingCuda])
def test_a_budget_inside_another_cannot_widen_it(kind: type[LimitedCuda], use: Any, meter: Meter) -> None:
    cuda = kind()
    use(cuda)
    with Budget({"gpu": 4 * GIB}, meter) as outer:
        with Budget({"gpu": 8 * GIB}, meter, lambda: outer.limits) as inner:
            assert cuda.fractions[0] == 0.25
            assert inner.limits == {"cuda:0": 4 * GIB}
        assert cuda.fractions[0] == 0.25
    assert cuda.fractions == [1.0, 1.0]


@pytest.mark.parametrize("total", [85_029_158_912, 25_438_126_080, 42_505_273_344])
def test_a_limit_is_no_byte_less_than_asked_for_on_a_card_of_any_size(
    use: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, total: int
) -> None:
    """torch takes the whole part of share times total: a byte less would cost a block of 2 MiB."""
    cuda = KnowingCuda()
    monkeypatch.setattr(cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=total))
    use(cuda)
    short = []
    for size in range(14 << 20, 5 * GIB, 14 << 20):
        limits = DeviceLimits()
        limits.set({"gpu": size}, {})
        short.append(int(cuda.fractions[0] * total) - size)
        limits.restore()
    assert set(short) <= {0, 1}


def test_more_than_the_card_has_is_all_that_it_has(use: Callable[[Any], None]) -> None:
    cuda = KnowingCuda()
    use(cuda)
    limits = DeviceLimits()
    limits.set({"gpu": 99 * GIB, "cuda:7": GIB}, {})
    assert (cuda.fractions[0], limits.limits) == (1.0, {"cuda:0": 16 * GIB})
    assert limits.notes == ["budget: there is no cuda:7 here"]
    limits.restore()


@pytest.mark.parametrize(("reserved", "emptied"), [(GIB, 0), (GIB + 1, 1)])
def test_a_cache_above_the_limit_is_emptied(reserved: int, emptied: int, use: Any, meter: Meter) -> None:
    cuda = KnowingCuda(reserved=(reserved, 9 * GIB))
    use(cuda)
    with Budget({"cuda:0": GIB}, meter) as budget:
        assert (cuda.emptied, budget.notes) == (emptied, ())
    assert cuda.emptied == emptied


@pytest.mark.parametrize(
    ("live", "fixed", "said"),
    [
        (
            2 * GIB,
            4 * GIB,
            "live tensors already hold 2.00 GiB of cuda:0, more than the 1.00 GiB allowed: torch gets nothing more "
            "from the device until enough of them are freed",
        ),
        (
            GIB,
            2 * GIB,
            "2.00 GiB of cuda:0 stay reserved, more than the 1.00 GiB allowed: 1.00 GiB of live tensors, and gaps "
            "beside them or pools of CUDA graphs; requests that fit into gaps still succeed",
        ),
    ],
)
def test_what_stays_above_the_limit_is_said(live: int, fixed: int, said: str, use: Any, meter: Meter) -> None:
    use(KnowingCuda(reserved=(9 * GIB, 0), live=live, fixed=fixed))
    with Budget({"gpu": GIB}, meter) as budget:
        assert budget.notes == (f"budget: {said}",)


def test_an_allocator_that_limits_live_tensors_may_keep_more_reserved(use: Any, meter: Meter) -> None:
    class Async(KnowingCuda):
        def get_allocator_backend(self) -> str:
            return "cudaMallocAsync"

    use(Async(reserved=(9 * GIB, 0), live=GIB, fixed=2 * GIB))
    with Budget({"gpu": GIB}, meter) as budget:
        assert budget.notes == ()


def test_a_cache_that_cannot_be_emptied_keeps_nobody_from_the_start(use: Any, meter: Meter) -> None:
    class Broken(KnowingCuda):
        def empty_cache(self) -> None:
            raise RuntimeError("device-side assert triggered")

    cuda = Broken(reserved=(9 * GIB, 0))
    use(cuda)
    with Budget({"gpu": GIB}, meter) as budget:
        text = "budget: the cache of cuda:0 cannot be emptied (RuntimeError: device-side assert triggered)"
        assert (budget.notes, cuda.fractions[0]) == ((text,), 1 / 16)


def test_an_interrupt_while_the_cache_is_emptied_leaves_no_limit(use: Any, meter: Meter) -> None:
    class Slow(KnowingCuda):
        def empty_cache(self) -> None:
            raise KeyboardInterrupt

    cuda = Slow(reserved=(9 * GIB, 0))
    use(cuda)
    with pytest.raises(KeyboardInterrupt):
        Budget({"gpu": GIB}, meter).start()
    assert cuda.fractions == [1.0, 1.0]


def test_the_current_device_stays_what_it_was(use: Any, meter: Meter) -> None:
    cuda = KnowingCuda()
    use(cuda)
    with Budget({"cuda:1": GIB}, meter):
        assert cuda.current == 0
    assert cuda.current == 0


def test_without_a_device_that_is_said(use: Callable[[Any], None], meter: Meter) -> None:
    use(None)
    with Budget({"gpu": GIB, "ram": GIB}, meter) as budget:
        pass
    assert budget.record is not None
    assert budget.record.limits == {"cpu": GIB}
    assert budget.record.notes == ("budget: there is no CUDA device here, so its GPU part limits nothing",)


def test_a_device_that_answers_no_more_keeps_nobody_from_the_end(use: Callable[[Any], None], meter: Meter) -> None:
    class Broken(KnowingCuda):
        def set_per_process_memory_fraction(self, fraction: float, index: int) -> None:
            if fraction == 1.0:
                raise RuntimeError("device-side assert triggered")
            super().set_per_process_memory_fraction(fraction, index)

    use(Broken())
    with Budget({"gpu": GIB}, meter) as budget:
        pass
    assert budget.record is not None
    assert budget.record.notes == ("budget: cuda:0 stays limited (RuntimeError: device-side assert triggered)",)


def test_a_broken_context_keeps_no_code_from_running_under_a_budget(use: Callable[[Any], None], meter: Meter) -> None:
    class Broken(KnowingCuda):
        def current_device(self) -> int:
            raise RuntimeError("device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`")

        def get_device_properties(self, index: int) -> Any:
            return self.current_device()

    use(Broken())
    ran = []
    for name, text in (("gpu", "no device can be limited"), ("cuda:1", "cuda:1 cannot be limited")):
        with Budget({name: GIB}, meter) as budget:
            ran.append(name)
        assert budget.notes == (f"budget: {text} (RuntimeError: device-side assert triggered)",)
    assert ran == ["gpu", "cuda:1"]


def test_no_limit_is_put_back_as_none_where_the_allocator_calls_it_more_than_all(use: Any, meter: Meter) -> None:
    class Async(KnowingCuda):
        def get_per_process_memory_fraction(self, index: int) -> float:
            return 2.0**30 if self.fractions[index] == 1.0 else self.fractions[index]

    cuda = Async()
    use(cuda)
    with Budget({"gpu": GIB}, meter) as budget:
        assert (cuda.fractions[0], budget.limits) == (1 / 16, {"cuda:0": GIB})
    assert (cuda.fractions, budget.notes) == ([1.0, 1.0], ())


def test_a_limit_that_the_code_under_a_budget_sets_stays(use: Any, meter: Meter) -> None:
    cuda = KnowingCuda()
    use(cuda)
    with Budget({"gpu": GIB}, meter) as budget:
        cuda.set_per_process_memory_fraction(0.9, 0)
    assert cuda.fractions == [0.9, 1.0]
    assert budget.notes == ("budget: somebody has set a new limit on cuda:0 meanwhile; it stays",)


def test_a_torch_that_caches_nothing_cannot_be_limited_and_that_is_said(
    use: Any, meter: Meter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    cuda = KnowingCuda()
    use(cuda)
    with Budget({"gpu": GIB, "ram": GIB}, meter) as budget:
        assert (cuda.fractions, budget.limits) == ([1.0, 1.0], {"cpu": GIB})
    text = "PYTORCH_NO_CUDA_MEMORY_CACHING is set: torch counts and limits nothing on CUDA devices"
    assert budget.notes == (f"budget: {text}",)


def test_the_hosts_peak_is_held_against_its_limit() -> None:
    probe = FakeProbe()
    meter = Meter([probe])
    probe.set(100)
    with Budget({"ram": 500}, meter) as low:
        probe.spike(500)
    with Budget({"ram": 499}, meter) as high:
        probe.spike(500)
    assert low.record is not None
    assert high.record is not None
    assert (low.record.crossings, low.record.peaks) == ((), {"cpu": 500})
    assert high.record.crossings == ("the code under the budget crossed the RAM budget of 499 B: its peak was 500 B",)
    meter.close()


def test_sizes_are_read() -> None:
    assert parse_budget("gpu=8GiB,ram=4GiB") == {"gpu": 8 * GIB, "ram": 4 * GIB}
    assert checked({"cuda:1": 5, "ram": None}) == {"cuda:1": 5}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no device is named"),
        ("gpu", "'gpu' is not NAME=SIZE"),
        ("gpu=1GiB,gpu=2GiB", "gpu is given twice"),
        ("gpu=lots", "'lots' is not a size"),
        ("ram=0", "a size above zero"),
        ("gpu=8", "gpu=8 means 8 B; write a unit, such as 8GiB"),
        ("tpu=1GiB", "'tpu' is not a device"),
    ],
)
def test_a_mistake_in_a_budget_is_said(text: str, said: str) -> None:
    with pytest.raises(BudgetError, match=said):
        parse_budget(text)


def test_a_budget_is_used_once(meter: Meter) -> None:
    budget = Budget({"ram": GIB}, meter)
    with budget:
        pass
    with pytest.raises(BudgetError, match="make a new one"):
        budget.start()


SCRIPT = """
import warnings, ipygpumem
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with ipygpumem.budget(ram="100MiB") as budget:
        block = bytearray(b"x") * (200 << 20)
print([str(item.message) for item in caught], budget.record.peaks["cpu"] > 200 << 20)
"""


def test_in_a_script_a_crossing_is_a_warning() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("['ipygpumem: the code under the budget crossed the RAM budget of 100 MiB: its peak")
    assert done.stdout.endswith(" True\n")


def now(kernel: Kernel) -> int:
    return int(kernel.value("__import__('psutil').Process().memory_info().rss"))


def test_a_cell_that_crosses_an_experiments_budget_is_named_at_once_and_in_the_record(kernel: Kernel) -> None:
    works(kernel, "import ipygpumem\nfrom tests.waiting import ticks")
    works(kernel, "def block(mib): return bytearray(b'x') * (mib << 20)")
    limit = now(kernel) + (100 << 20)
    works(kernel, f"%experiment start small --budget ram={limit}")
    assert works(kernel, "x = block(10)").reports("note") == []
    reply = works(kernel, "y = block(200); ticks(2); del y")
    assert "ipygpumem: cell 6 has crossed the RAM budget of" in reply.stderr
    assert reply.stderr.count("\n") == 1
    assert "cell 6 crossed the RAM budget of" in reply.reports("note")[0]
    quick = works(kernel, "y = block(200); del y")
    assert "cell 7 crossed the RAM budget of" in quick.reports("note")[0]
    report = works(kernel, "%experiment end").reports("experiment")[0]
    assert "cell 6 crossed the RAM budget" in report
    assert "cell 7 crossed the RAM budget" in report
    record = kernel.value("ipygpumem.experiments()[-1].to_dict()")
    assert record["budget"] == {"cpu": limit}
    assert len([line for line in record["notes"] if "crossed the RAM budget" in line]) == 2
    assert works(kernel, "y = block(200); del y").reports("note") == []


def test_a_with_block_reports_its_crossing_and_has_a_record(kernel: Kernel) -> None:
    works(kernel, "import ipygpumem\ndef block(mib): return bytearray(b'x') * (mib << 20)")
    limit = now(kernel) + (100 << 20)
    reply = works(kernel, f"with ipygpumem.budget(ram={limit}) as b:\n    block(200)\n'after'")
    assert "cell 3 crossed the RAM budget" in reply.reports("note")[0]
    assert kernel.value("len(b.record.crossings), b.record.limits") == (1, {"cpu": limit})


def test_autofit_keeps_to_a_budget(kernel: Kernel) -> None:
    works(kernel, "def block(mib): return bytearray(b'x') * (mib << 20)")
    limit = now(kernel) + (300 << 20)
    reply = works(
        kernel, f"%%experiment a --keep mib,size --budget ram={limit}\n%%autofit mib=1600\nsize = len(block(mib))"
    )
    assert kernel.value("mib, size >> 20") == (200, 200)
    assert "over the budget" in reply.reports("autofit")[0]


def test_a_mistake_is_one_line_and_unloading_puts_everything_back(shell: InteractiveShell, capsys: Any) -> None:
    shell.run_line_magic("load_ext", "ipygpumem")
    result = shell.run_cell("%experiment start a --budget tpu=4GiB")
    assert not result.success
    assert "'tpu' is not a device" in capsys.readouterr().err
    shell.run_cell("%experiment start b --budget ram=1TiB")
    budgets = notebook_of(shell).budgets
    assert len(budgets.in_force) == 1
    shell.run_line_magic("unload_ext", "ipygpumem")
    assert budgets.in_force == []


def test_a_budget_from_python_is_checked() -> None:
    with pytest.raises(BudgetError, match="no device is named"):
        ipygpumem.budget()
