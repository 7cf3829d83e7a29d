"""Budgets: torch's limits and their restoring, and who refused memory by torch's own text."""

import sys
import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import ipygpumem
from ipygpumem.errors import BudgetError, DeviceError
from ipygpumem.fitting import budgets, reservations
from ipygpumem.fitting.budgets import Budget, note_refusal, parse_budget
from ipygpumem.units import GIB
from tests.fake_cuda_limits import TEXT, KnowingCuda, LimitedCuda
from tests.fakes import fake_module


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Let budgets and reservations see this ``torch.cuda``."""
    budgets.fractions.clear()

    def use_cuda(cuda: Any) -> None:
        for module in (budgets, reservations):
            monkeypatch.setattr(module, "torch_cuda", lambda: cuda)

    return use_cuda


def test_a_budget_restores_the_earlier_limit_even_after_an_error(use: Any) -> None:
    cuda = KnowingCuda(reserved=(0, 5))
    cuda.fractions = [0.75, 1.0]
    use(cuda)
    budget = Budget({"gpu": 8 * GIB, "cuda:1": 4 * GIB})
    with pytest.raises(ZeroDivisionError), budget:  # noqa: PT012  # what is in force inside is the point
        assert cuda.fractions == pytest.approx([0.5, 0.25])
        assert budget.limits == {"cuda:0": 8 * GIB, "cuda:1": 4 * GIB}
        assert cuda.current == 0
        raise ZeroDivisionError
    assert (cuda.fractions, cuda.current) == ([0.75, 1.0], 0)


@pytest.mark.parametrize("kind", [LimitedCuda, KnowingCuda])
def test_a_budget_inside_another_cannot_widen_it(kind: type[LimitedCuda], use: Any) -> None:
    cuda = kind()
    use(cuda)
    with Budget({"gpu": 4 * GIB}):
        with Budget({"gpu": 8 * GIB}) as inner:
            assert cuda.fractions[0] == pytest.approx(0.25)
            assert inner.limits == {"cuda:0": 4 * GIB}
        assert cuda.fractions[0] == pytest.approx(0.25)
    assert (cuda.fractions, budgets.in_force) == ([1.0, 1.0], [])


def test_a_limit_is_no_byte_too_small_on_a_card_of_any_size(
    use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = KnowingCuda()
    use(cuda)
    for total in (85_029_158_912, 25_438_126_080, 42_505_273_344):
        monkeypatch.setattr(
            cuda,
            "get_device_properties",
            lambda index, size=total: SimpleNamespace(total_memory=size),
        )
        for size in range(14 << 20, 5 * GIB, 14 << 20):
            with Budget({"gpu": size}):
                assert int(cuda.fractions[0] * total) - size in (0, 1)


def test_a_budget_above_the_cards_size_is_the_cards_size(use: Any) -> None:
    cuda = KnowingCuda()
    use(cuda)
    with Budget({"gpu": 99 * GIB, "cuda:7": GIB}) as budget:
        assert (cuda.fractions[0], budget.limits) == (1.0, {"cuda:0": 16 * GIB})
    assert budget.notes == ["budget: there is no cuda:7 here"]


WHY = [
    (KnowingCuda(), fake_module(), "torch sees 2 CUDA devices"),
    (None, fake_module(), "torch sees no CUDA device"),
]


@pytest.mark.parametrize(("cuda", "torch", "why"), [*WHY, (None, None, "torch cannot be imported")])
def test_a_card_that_cannot_be_reserved_has_a_reason(
    cuda: Any, torch: Any, why: str, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(cuda)
    monkeypatch.setitem(sys.modules, "torch", torch)
    for reserve in (ipygpumem.allocate, ipygpumem.leave_free):
        with pytest.raises(DeviceError, match=f"^there is no cuda:7 here: {why}$"):
            reserve("1 MiB", "cuda:7")


STAYS = (
    "2.00 GiB of cuda:0 stay reserved, 1.00 GiB of them by live tensors: more than the 1.00 GiB "
    "allowed"
)


@pytest.mark.parametrize(
    ("cuda", "emptied", "notes"),
    [
        (KnowingCuda(reserved=(GIB, 9 * GIB)), 0, []),
        (KnowingCuda(reserved=(GIB + 1, 9 * GIB)), 1, []),
        (KnowingCuda(reserved=(9 * GIB, 0), live=GIB, fixed=2 * GIB), 1, [STAYS]),
    ],
)
def test_a_cache_above_the_limit_is_emptied(
    use: Any, cuda: KnowingCuda, emptied: int, notes: list[str]
) -> None:
    use(cuda)
    with Budget({"cuda:0": GIB}) as budget:
        assert (cuda.emptied, budget.notes) == (emptied, [f"budget: {note}" for note in notes])


BROKEN = RuntimeError("device-side assert triggered")


FAULTS = dict.fromkeys(("get_device_properties", "empty_cache"), "cuda:0 cannot be limited")


@pytest.mark.parametrize(
    ("call", "fault"), [*FAULTS.items(), ("current_device", "no device can be limited")]
)
def test_a_broken_device_is_noted_and_the_code_runs(use: Any, call: str, fault: str) -> None:
    cuda = KnowingCuda(reserved=(9 * GIB, 0))

    def broken(*_: object) -> None:
        raise BROKEN

    setattr(cuda, call, broken)
    use(cuda)
    with Budget({"gpu": GIB}) as budget:
        assert budget.notes == [f"budget: {fault} (RuntimeError: device-side assert triggered)"]
    assert cuda.fractions == [1.0, 1.0]


def test_a_device_that_fails_at_the_end_is_noted(use: Any) -> None:
    class Broken(KnowingCuda):
        def set_per_process_memory_fraction(self, fraction: float, index: int) -> None:
            if fraction == 1.0:
                raise BROKEN
            super().set_per_process_memory_fraction(fraction, index)

    use(Broken())
    with Budget({"gpu": GIB}) as budget:
        pass
    assert budget.notes == [
        "budget: cuda:0 stays limited (RuntimeError: device-side assert triggered)"
    ]


def test_a_budget_restores_no_limit_as_a_fraction_of_one(use: Any) -> None:
    class Async(KnowingCuda):
        def get_per_process_memory_fraction(self, index: int) -> float:
            return 2.0**30 if self.fractions[index] == 1.0 else self.fractions[index]

    cuda = Async()
    use(cuda)
    with Budget({"gpu": GIB}) as budget:
        assert (cuda.fractions[0], budget.limits) == (pytest.approx(1 / 16), {"cuda:0": GIB})
    assert (cuda.fractions, budget.notes) == ([1.0, 1.0], [])


def test_a_limit_that_the_code_under_a_budget_sets_stays(use: Any) -> None:
    cuda = KnowingCuda()
    use(cuda)
    with Budget({"gpu": GIB}) as budget:
        cuda.set_per_process_memory_fraction(0.9, 0)
    assert cuda.fractions == [0.9, 1.0]
    assert budget.notes == ["budget: other code changed the limit on cuda:0; it is kept"]


@pytest.mark.parametrize(
    ("cuda", "said"),
    [
        (None, "there is no CUDA device here, so it limits nothing"),
        (
            KnowingCuda(),
            "PYTORCH_NO_CUDA_MEMORY_CACHING is set: torch counts and limits nothing on CUDA devices",  # noqa: E501
        ),
    ],
)
def test_devices_that_cannot_be_limited_are_reported(
    use: Any, monkeypatch: pytest.MonkeyPatch, cuda: Any, said: str
) -> None:
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    use(cuda)
    with Budget({"gpu": GIB}) as budget:
        assert (budget.limits, budget.notes) == ({}, [f"budget: {said}"])


def test_sizes_are_read() -> None:
    assert parse_budget("gpu=8GiB,,cuda:1=4GiB") == {"gpu": 8 * GIB, "cuda:1": 4 * GIB}
    assert parse_budget("cuda=8GiB,CUDA:1=4GiB") == {"gpu": 8 * GIB, "cuda:1": 4 * GIB}
    for text, said in (
        ("", "name a device, such as"),
        ("8", "'8' must be a device and a size: write for instance gpu=8GiB"),
        ("gpu=", "'' is not a size"),
        ("gpu=lots", "'lots' is not a size"),
        ("ram=4GiB", r"RAM cannot be limited; write gpu=SIZE, or use leave_free\(SIZE, 'RAM'\)"),
        ("HOST=4GiB", "RAM cannot be limited"),
        ("cpu:0=4GiB", "RAM cannot be limited"),
        ("cuda:01=4GiB", "'cuda:01' is not a device"),
        ("gpu=8", "gpu: '8' has no unit: write 8GiB, or 8 bytes"),
        ("gpu=8B", "gpu: 8 B is too little"),
        ("tpu=1GiB", "'tpu' is not a device"),
    ):
        with pytest.raises(BudgetError, match=said):
            parse_budget(text)


def test_a_mistake_is_one_line_and_unloading_restores_the_limit(
    shell: InteractiveShell, capsys: Any, use: Any
) -> None:
    cuda = KnowingCuda()
    use(cuda)
    shell.run_line_magic("load_ext", "ipygpumem")
    assert not shell.run_cell("%experiment start a --budget ram=4GiB").success
    assert "RAM cannot be limited" in capsys.readouterr().err
    shell.run_cell("%experiment start b --budget gpu=1GiB")
    assert (len(budgets.in_force), cuda.fractions[0]) == (1, pytest.approx(1 / 16))
    shell.run_line_magic("unload_ext", "ipygpumem")
    assert (budgets.in_force, cuda.fractions) == ([], [1.0, 1.0])


SAID = "refused 2.00 GiB of cuda:0, although 23.00 GiB of it were free"


def test_a_limit_that_refused_free_memory_is_named() -> None:
    lift = "torch.cuda.set_per_process_memory_fraction(1.0, 0)"
    assert note_refusal(TEXT) == (
        "cuda:0",
        GIB,
        None,
        f"the limit of 1.00 GiB on torch's allocator {SAID}",
        lift,
    )
    others = (
        TEXT.replace("1024.00 MiB allowed; ", ""),
        TEXT.replace("23.00", "1.00"),
        TEXT.replace("CUDA", "XPU"),
        "",
    )
    assert [note_refusal(message) for message in others] == [None] * 4


@pytest.mark.usefixtures("others_out_of_sight")
@pytest.mark.parametrize(
    ("cell", "by", "notes"),
    [
        (
            "%%experiment small --budget gpu=1GiB\nfail()",
            "the budget of experiment small (1.00 GiB)",
            1,
        ),
        (
            textwrap.dedent(
                """\
                %%experiment large --budget gpu=9GiB
                import ipygpumem
                with ipygpumem.budget(gpu='1GiB'):
                    try:
                        fail()
                    except Exception as error:
                        raise ValueError('mine') from error"""
            ),
            "the budget of the with block (1.00 GiB)",
            0,
        ),
        (
            "%%experiment a --budget gpu=8GiB\nfail()",
            "the limit of 1.00 GiB on torch's allocator",
            0,
        ),
        ("%%experiment a\nfail()", "the limit of 1.00 GiB on torch's allocator", 0),
    ],
)
def test_the_limit_that_refused_is_named(
    shell: InteractiveShell, use: Any, cell: str, by: str, notes: int
) -> None:
    use(KnowingCuda())
    shell.run_line_magic("load_ext", "ipygpumem")
    shell.run_cell(
        f"""
        class OutOfMemoryError(RuntimeError): pass
        def fail(): raise OutOfMemoryError({TEXT!r})
        """
    )
    shell.run_cell(cell)
    record = ipygpumem.last()
    assert record is not None
    assert record.recovery is not None
    cause = record.recovery.cause
    assert cause is not None
    assert cause.kind == "limit"
    assert cause.device == "cuda:0"
    assert cause.text == f"{by} {SAID}"
    assert ipygpumem.experiments()[-1].notes == (cause.text,) * notes
    shell.run_line_magic("unload_ext", "ipygpumem")
