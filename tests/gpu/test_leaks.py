"""Who holds what survived, for tensors on a GPU."""

from __future__ import annotations

from ipygpumem.units import MIB
from tests.gpu.support import allocated, break_context, ready, run_ok
from tests.kernel import Kernel

_BLOCK = "torch.empty(64 << 20, dtype=torch.uint8, device='cuda')"


def leaks(kernel: Kernel) -> str:
    (report,) = run_ok(kernel, "%gpumem leaks").reports("leaks")
    return report


def test_a_survivor_on_the_device_is_named(gpu_kernel: Kernel) -> None:
    """A tensor that a dict outside the experiment holds is told at the end, with the path that leads to it."""
    run_ok(gpu_kernel, "cache = {}")
    live = allocated(gpu_kernel)
    run_ok(gpu_kernel, "%experiment start kept")
    run_ok(gpu_kernel, f"x = {_BLOCK}; cache['run3'] = [x]")
    (report,) = run_ok(gpu_kernel, "%experiment end").reports("experiment")
    assert "x: Tensor uint8 67108864 on cuda:0" in report
    assert 'held by notebook variable cache["run3"][0]' in report
    assert allocated(gpu_kernel) - live == 64 * MIB
    assert 'held by notebook variable cache["run3"][0]' in leaks(gpu_kernel)
    run_ok(gpu_kernel, "cache.clear()")
    assert allocated(gpu_kernel) == live


def test_what_a_graph_saved_is_traced_to_the_loss(gpu_kernel: Kernel) -> None:
    """Activations that only autograd's C++ code holds are told with the loss whose graph saved them."""
    run_ok(gpu_kernel, "losses = []")
    run_ok(gpu_kernel, "%experiment start graph")
    run_ok(
        gpu_kernel,
        "w = torch.ones(16 << 20, device='cuda', requires_grad=True)\n"
        "hidden = w.exp()\nlosses.append(hidden.square().sum())",
    )
    (report,) = run_ok(gpu_kernel, "%experiment end").reports("experiment")
    assert report.count("held by notebook variable losses[0]: its autograd graph") == 2
    run_ok(gpu_kernel, "losses.clear()")
    assert "losses" not in leaks(gpu_kernel)


def test_a_gradient_is_traced_to_its_parameter(gpu_kernel: Kernel) -> None:
    """A gradient that an outer model got inside the experiment is told as that parameter's."""
    run_ok(gpu_kernel, "model = torch.nn.Linear(4096, 4096, device='cuda')")
    run_ok(gpu_kernel, "%experiment start step")
    run_ok(gpu_kernel, "model(torch.ones(1, 4096, device='cuda')).sum().backward()")
    (report,) = run_ok(gpu_kernel, "%experiment end").reports("experiment")
    assert "held by notebook variable model.weight.grad" in report
    run_ok(gpu_kernel, "del model")


def test_explaining_works_with_a_broken_context(kernel: Kernel) -> None:
    """After a device-side assert %gpumem leaks and %gpumem tensors still answer."""
    ready(kernel)
    run_ok(kernel, f"%experiment start kept\ncache = [{_BLOCK}]")
    break_context(kernel)
    for command in ("leaks", "tensors"):
        reply = kernel.run(f"%gpumem {command}")
        assert reply.status == "ok", reply.traceback
        assert reply.reports(command), command
