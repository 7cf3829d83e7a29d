"""Freeing by hand on a device: defragmented, and kept on the host for a while."""

from collections.abc import Callable, Iterator

import pytest

from benchmarks.harness.kernel import Kernel
from tests.gpu.support import allocated, ready
from tests.steps import run_quietly

FRAGMENTED = """
import torch, ipygpumem
from ipygpumem.extras.moving import moving
from torch import nn
fill = moving._MovedPiece.fill
class Many(nn.Module):
    def __init__(self):
        super().__init__()
        kept, gone = [], []
        while torch.cuda.mem_get_info()[0] > 128 << 20:  # until the card is full
            kept.append(nn.Parameter(torch.full((1 << 19,), float(len(kept))).cuda()))
            gone += [torch.empty(2 << 20, dtype=torch.uint8, device='cuda') for _ in range(9)]
        self.weights = nn.ParameterList(kept)
many = Many()
def fits(gib=4):
    try:
        torch.empty(gib << 30, dtype=torch.uint8, device='cuda')
    except torch.OutOfMemoryError:
        return False
    return True
def right():
    return all(bool((weight.detach().cpu() == place).all()) for place, weight in enumerate(many.weights))
"""  # noqa: E501
"""A model of which each segment of the allocator has a piece, with garbage between."""


@pytest.mark.simulated
def test_a_purge_of_a_fragmented_card(
    machine: Callable[..., None], figure: Callable[[str], None]
) -> None:
    """A card is so fragmented that 4 GiB do not fit; after `purge` they do, the model as it was. If
    the card is full when a purge brings the model back, it stays on the host, whole, and a warning
    says so.
    """
    machine(cards=1, gib=6)
    with Kernel() as kernel:
        run_quietly(kernel, FRAGMENTED)
        before = allocated(kernel)
        run_quietly(kernel, "torch.cuda.empty_cache()")
        assert kernel.value("fits()") is False
        assert kernel.value("right()") is True

        # After a purge there is room, and the model is the same.
        run_quietly(kernel, "ids = [id(w) for w in many.weights]\nrecord = ipygpumem.purge(many)")
        assert kernel.value("fits()") is True
        assert kernel.value("right()") is True
        assert kernel.value("ids == [id(w) for w in many.weights]") is True
        assert allocated(kernel) == before
        figure(kernel.value("str(record)").splitlines()[-1])
        assert kernel.value("record.before['cuda:0'] - record.after['cuda:0'] > 4 << 30") is True

        # The card is filled while a second purge brings the model back: at the fifth of its pieces.
        run_quietly(
            kernel,
            """
            def taken(self, tries=[]):
                tries.append(1)
                if len(tries) == 5:
                    rest = torch.cuda.mem_get_info()[0] - (8 << 20)
                    tries.append(torch.empty(rest, dtype=torch.uint8, device='cuda'))
                fill(self)
            moving._MovedPiece.fill = taken
            """,
        )
        reply = kernel.run("record = ipygpumem.purge(many)")
        assert reply.status == "ok"
        assert "stay on the host: they did not fit back (CUDA out of memory" in reply.stderr
        assert kernel.value("record.is_on_host") is True
        assert kernel.value("{w.device.type for w in many.weights}") == {"cpu"}
        assert kernel.value("right()") is True


@pytest.fixture(scope="module")
def freeing() -> Iterator[Kernel]:
    """A kernel without the extension that has imported all of it."""
    with Kernel() as kernel:
        ready(kernel)
        run_quietly(kernel, "import ipygpumem\nfrom torch import nn")
        yield kernel


def test_inside_offload_a_model_is_on_the_host(freeing: Kernel) -> None:
    """`with offload(model, optimizer)` gives memory back; what is done on the host meanwhile is
    kept. After an error all is on the device again, and what was replaced on the host stays there,
    with a warning.
    """
    run_quietly(
        freeing,
        "model = nn.Linear(1024, 1024).cuda()\noptimizer = torch.optim.SGD(model.parameters(), "
        "0.1, 0.9)",
    )
    before = allocated(freeing)
    run_quietly(
        freeing,
        """
        with ipygpumem.offload(model, optimizer):
            inside = torch.cuda.memory_allocated(), model.weight.device.type
            model(torch.ones(1, 1024)).sum().backward(); optimizer.step()
            with ipygpumem.offload(model): pass
            values = model.weight.detach().clone()
        """,
    )
    assert freeing.value("inside") == (before - 4 * 1024 * 1025, "cpu")
    devices = (
        "{t.device.type for p in model.parameters() for t in (p, p.grad, "
        "*optimizer.state[p].values())}"
    )
    assert freeing.value(f"{devices}, torch.equal(model.weight.detach().cpu(), values)") == (
        {"cuda"},
        True,
    )
    run_quietly(freeing, "optimizer.zero_grad()")
    assert freeing.run("with ipygpumem.offload(model): 1/0").error == "ZeroDivisionError"
    assert freeing.value("model.weight.device.type") == "cuda"
    run_quietly(freeing, "with ipygpumem.offload(model): model.half()")
    assert freeing.value("(model.weight.device.type, str(model.weight.dtype))") == (
        "cuda",
        "torch.float16",
    )


def test_after_a_signal_handlers_error_all_is_on_the_device(freeing: Kernel) -> None:
    run_quietly(
        freeing,
        """
        from ipygpumem.extras.moving import moving
        class Alarm(BaseException): pass
        model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).cuda()
        before = torch.cuda.memory_allocated()
        values = [p.detach().cpu().clone() for p in model.parameters()]
        empty, calls = moving._MovedPiece.empty, []
        def interrupted(piece):
            calls.append(piece)
            if len(calls) == 3:
                raise Alarm
            empty(piece)
        moving._MovedPiece.empty = interrupted
        """,
    )
    assert freeing.run("with ipygpumem.offload(model): pass").error == "Alarm"
    run_quietly(freeing, "moving._MovedPiece.empty = empty; calls.clear()")
    same = "all(map(torch.equal, [p.detach().cpu() for p in model.parameters()], values))"
    places = "{p.device.type for p in model.parameters()}"
    assert freeing.value(f"{places}, {same}") == ({"cuda"}, True)
    assert freeing.value("torch.cuda.memory_allocated() == before")


def test_a_model_is_not_moved_while_a_captured_graph_may_use_it(bare_kernel: Kernel) -> None:
    """If a private pool of the allocator is in use, `offload` refuses, and the model stays on the
    device.
    """
    ready(bare_kernel)
    run_quietly(
        bare_kernel,
        "import ipygpumem\nmodel, pool = torch.nn.Linear(4, 4).cuda(), torch.cuda.MemPool()",
    )
    run_quietly(
        bare_kernel, "with torch.cuda.use_mem_pool(pool): kept = torch.ones(8, device='cuda')"
    )
    reply = bare_kernel.run("with ipygpumem.offload(model): pass")
    assert "a captured CUDA graph may use these addresses: nothing was moved" in reply.traceback
    assert bare_kernel.value("model.weight.device.type") == "cuda"


@pytest.mark.simulated
def test_a_purge_leaves_each_part_on_its_own_device(machine: Callable[..., None]) -> None:
    """A model on two cards and the host comes back to where each part was."""
    machine(cards=2, gib=8)
    with Kernel() as kernel:
        run_quietly(
            kernel,
            """
            import torch, ipygpumem
            from torch import nn
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
            model[0].cuda(0); model[1].cuda(1)
            was = [(p.device, p.detach().cpu().tolist()) for p in model.parameters()]
            record = ipygpumem.purge(model)
            """,
        )
        assert kernel.value("sorted(record.after), record.notes") == (["cuda:0", "cuda:1"], ())
        assert (
            kernel.value(
                "was == [(p.device, p.detach().cpu().tolist()) for p in model.parameters()]"
            )
            is True
        )
