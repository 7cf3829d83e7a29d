"""Why memory ran out on a card: the report's cause, and its remedy, after which the same request
fits.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from benchmarks.harness.kernel import Kernel
from tests.gpu.conftest import choose_cards
from tests.gpu.support import TIDY, cases, other_process, recovery, started_kernel
from tests.steps import SharedKernel, run, run_failing, run_quietly

DEFINE_GB = """
import os, torch, ipygpumem
def gb(size): return torch.empty(int(size * 2**30), dtype=torch.uint8, device="cuda")
def cause():
    found = ipygpumem.last().recovery.cause
    return found and (found.kind, found.text, found.remedy)
"""
pytestmark = pytest.mark.simulated


@pytest.fixture(scope="module")
def shared_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedKernel]:
    """A kernel on a card of this module: 24 GiB, of which the driver and the context take 0.65."""
    whole_card = "torch.cuda.set_per_process_memory_fraction(1.0)"
    shared = SharedKernel(*TIDY, f"{DEFINE_GB}\n{whole_card}; gb(0.01); None", timeout=600)
    with pytest.MonkeyPatch.context() as patch:
        choose_cards(patch, tmp_path_factory.mktemp("causes"), gib=24)
        yield shared
        shared.close()


@pytest.fixture
def on_card(shared_kernel: SharedKernel) -> Kernel:
    """The same, tidied."""
    return shared_kernel.get()


def cause(kernel: Kernel, cell: str) -> tuple[str, str, str]:
    """Run a cell that runs out of memory; return its cause, which the report shows."""
    report = recovery(run_failing(kernel, cell, "OutOfMemoryError"))
    texts: tuple[str, str, str] = kernel.value("cause()")
    assert ": ".join(filter(None, texts[1:])) in report
    return texts


def test_a_request_larger_than_the_card_or_its_free_memory(on_card: Kernel) -> None:
    """More than the card has, and more than is free, say how much too much it is."""
    kind, text, remedy = cause(on_card, "gb(30)")
    assert kind == "too large"
    assert text == "asked for 30.00 GiB, but cuda:0 has 24.00 GiB in total"
    assert remedy == ""
    kind, text, remedy = cause(on_card, "model = gb(12)\nx = gb(18)")
    assert (kind, remedy) == ("too much", "")
    assert text == "asked for 18.00 GiB, but 11.35 GiB of cuda:0 were free: 6.65 GiB too much"
    run_quietly(
        on_card,
        "class Step:\n    def __call__(self): return inner()",
        "def inner(): return gb(18) + len(model)",
    )
    run_quietly(on_card, "step = Step()")
    # the cell uses the model, though not by its name
    assert cause(on_card, "step()")[0] == "too much"
    run_quietly(on_card, "name = 'model'")
    assert cause(on_card, "globals()[name], gb(18)")[0] == "too much"


def test_names_of_earlier_cells_hold_the_cards_memory(on_card: Kernel) -> None:
    """Names that the cell does not use are named with their cells, one or as many as it takes, and
    with all aliases; once they are deleted, the cell runs. A name whose memory something else holds
    is not blamed.
    """
    first = on_card.value("get_ipython().execution_count")
    run_quietly(
        on_card,
        "history = [gb(0.5) for _ in range(8)]",
        "cache = {'x': gb(3)}; also = cache",
        "model = gb(10)",
    )

    # One name is enough.
    kind, text, remedy = cause(on_card, "x = gb(8 + 0 * len(model))")
    assert (kind, remedy) == ("names", "del history")
    held = f". 4.00 GiB are still held by history from cell {first}, which this cell does not use"
    assert held in text

    # It takes two.
    kind, text, remedy = cause(on_card, "x = gb(12.5 + 0 * len(model))")
    assert (kind, remedy) == ("names", "del history, cache, also")
    both = f"history from cell {first} and cache from cell {first + 1}"
    assert f"7.00 GiB are still held by {both}, which" in text
    run_quietly(on_card, remedy, "x = gb(12.5 + 0 * len(model))", "del x")

    # A module holds the memory, too: deleting the name would not free it.
    run_quietly(on_card, "history = [gb(6)]", "import sys; sys.kept = history[0]")
    assert cause(on_card, "x = gb(8 + 0 * len(model))")[0] == "too much"
    run_quietly(on_card, "del sys.kept")


def test_gaps_in_the_cache_are_each_too_small(on_card: Kernel) -> None:
    """Enough is free, but in pieces: the setting is offered, with which it fits."""
    code = "x = gb(20); del x; y = gb(1); z = gb(6); None"
    run_quietly(on_card, code)
    kind, text, remedy = cause(on_card, "big = gb(15)")
    assert kind == "fragmentation"
    assert (
        "and 16.35 GiB of cuda:0 were free, but the largest block had 13.00 GiB: fragmentation"
        in text
    )
    assert cause(on_card, "big = gb(17)")[0] == "names"
    run_quietly(on_card, "y = z = None\n%gpumem free")
    variable, _, setting = remedy.rpartition("%env ")[2].partition("=")
    with started_kernel(**{variable: setting}) as kernel:
        run_quietly(kernel, DEFINE_GB, "gb(0.01); None", code, "big = gb(15)")


def test_other_processes_hold_the_cards_memory(on_card: Kernel) -> None:
    """The process that holds too much is named, a kernel as one; several together if no single one
    decides.
    """
    with other_process(16 * 1024) as process:
        kind, text, remedy = cause(on_card, "x = gb(10)")
        assert (kind, remedy) == ("process", "end it if it is yours")
        assert f". process {process.pid} (python" in text
        assert ") has 16.40 GiB of it" in text

    # A kernel.
    with started_kernel() as other:
        run_quietly(other, DEFINE_GB, "x = gb(16)")
        kind, text, remedy = cause(on_card, "x = gb(10)")
        assert (kind, remedy) == ("process", "shut that kernel down")
        assert f"process {other.value('os.getpid()')} (" in text
        assert ", of another kernel) has 16.40 GiB of it" in text

        # Neither of two decides alone.
        with other_process(4 * 1024):
            kind, text, _ = cause(on_card, "x = gb(22)")
            assert (kind, "2 other processes have 20.80 GiB of it" in text) == ("process", True)
    run_quietly(on_card, "x = gb(22)")


def test_limits_refuse_the_request(on_card: Kernel) -> None:
    """A budget or another limit on torch's allocator is named if the card had the memory, with both
    allocators.
    """
    assert cause(on_card, "%%experiment a --budget gpu=2GiB\ngb(4)")[0] == "limit"
    asynchronous = "backend:cudaMallocAsync"
    with started_kernel(
        PYTORCH_CUDA_ALLOC_CONF=asynchronous, PYTORCH_ALLOC_CONF=asynchronous
    ) as other:
        run_quietly(other, DEFINE_GB)
        for kernel in (on_card, other):
            run_quietly(kernel, "torch.cuda.set_per_process_memory_fraction(0.5)")
            kind, text, remedy = cause(kernel, "x = gb(14)")
            assert (kind, text.partition(" refused")[0]) == (
                "limit",
                "the limit of 12.00 GiB on torch's allocator",
            )
            run_quietly(kernel, remedy, "x = gb(14)", "del x", "%gpumem free")
            assert cause(kernel, "x = gb(23.8)")[0] == "too much"


RANDOM = """
import random
first = second = model = None
def fill(most, less=0):
    global count
    count, kept = 0, []
    while count < most:
        kept.append(gb(max(0, wanted + 0 * len(model) - less * (count == most - 1))))
        count += 1
"""
STATE = """
choose = random.Random({})
for name in ("first", "second", "model"):
    parts = []
    for _ in range(choose.randint(0, 6)):
        parts.append(gb(choose.choice([0.004, 0.02, 0.3, 1, 3])))
        if choose.random() < 0.5:
            parts.pop(choose.randrange(len(parts)))
    globals()[name] = parts
del parts
wanted = choose.choice([0.3, 1, 4, 8, 12, 20])
"""
"""No function: a function of the notebook that mentions names may be called by anything, so they
are not blamed.
"""
EMPTY_CACHE = "torch.cuda.empty_cache()"
RESET = f"""
first = second = model = None
{EMPTY_CACHE}
"""
EXPANDABLE = "torch._C._accelerator_setAllocatorSettings('expandable_segments:{}')"


def test_random_states(on_card: Kernel, figure: Callable[[str], None]) -> None:
    """In 100 random states (names, gaps, another process, a limit) the cause is never wrong:
    without it, the same request fits.
    """
    kinds = Counter[str]()
    run_quietly(on_card, RANDOM)
    with started_kernel() as other:
        run_quietly(other, DEFINE_GB)
        for seed in range(cases(100)):
            choose = random.Random(-seed - 1)
            run_quietly(on_card, RESET)
            run_quietly(
                other,
                f"""
                x = None
                {EMPTY_CACHE}
                x = gb({choose.choice([0.1, 4, 14])})
                """,
            )
            lift = (
                f"torch.cuda.set_per_process_memory_fraction({choose.choice([1.0, 1.0, 1.0, 0.6])})"
            )
            # Else it was too large itself.
            if run(on_card, lift + STATE.format(seed)).error is None:
                run_failing(on_card, "fill(1000)", "OutOfMemoryError")
            kind, text, remedy = on_card.value("cause() or ('none', '', '')")
            kinds[kind] += 1
            if on_card.value("model is None"):
                continue
            run_quietly(on_card, RESET + STATE.format(seed))
            if kind == "process":
                run_quietly(other, f"x = None\n{EMPTY_CACHE}")
            elif kind == "fragmentation":
                run_quietly(on_card, f"{RESET}\n{EXPANDABLE.format(True)}{STATE.format(seed)}")
            elif kind in ("names", "limit"):
                run_quietly(on_card, remedy)
            else:
                continue
            # its context, which stays
            reply = run(on_card, f"fill(count + 1, {0.42 * (kind == 'process')})")
            assert reply.error is None, (seed, text, remedy)
            kinds["the request then fitted"] += 1
            run_quietly(on_card, EXPANDABLE.format(False))
    figure(", ".join(f"{kind}: {number}" for kind, number in sorted(kinds.items())))
    assert {"too much", "fragmentation", "process", "names", "limit"} <= kinds.keys()
