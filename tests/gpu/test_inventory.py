"""Inventories of tensors on the device."""

from __future__ import annotations

from collections.abc import Callable

from ipygpumem.units import MIB
from tests.gpu.support import DEVICE, allocated, breaking_context, run_ok, script
from tests.kernel import Kernel


def test_the_inventory_adds_up_to_what_torch_counts(gpu_kernel: Kernel) -> None:
    """What a new tensor adds to the inventory of the device is what torch's allocator counts for it."""
    run_ok(gpu_kernel, "import ipygpumem\ngc.collect()\nfirst = ipygpumem.tensors(device='cuda')")
    live = allocated(gpu_kernel)
    run_ok(gpu_kernel, "big = torch.empty(64 << 20, dtype=torch.uint8, device='cuda'); view = big[5:]")
    run_ok(gpu_kernel, "second = ipygpumem.tensors(device='cuda')\ndiff = ipygpumem.diff(first, second)")
    assert gpu_kernel.value("[(r.name, r.size_bytes, r.aliases) for r in diff.came]") == [("big", 64 * MIB, 1)]
    assert gpu_kernel.value("diff.changed_bytes") == {DEVICE: allocated(gpu_kernel) - live}
    run_ok(gpu_kernel, "del big, view")


def test_the_kinds_of_a_model_in_training(gpu_kernel: Kernel) -> None:
    """Parameters, gradients and an optimizer's state are told apart on the device."""
    run_ok(
        gpu_kernel,
        "import ipygpumem\n"
        "net = torch.nn.Linear(512, 512, bias=False, device='cuda'); adam = torch.optim.Adam(net.parameters())\n"
        "net(torch.ones(1, 512, device='cuda')).sum().backward(); adam.step()",
    )
    run_ok(gpu_kernel, f"found = ipygpumem.tensors('net*', 'adam*', device='cuda', min_bytes={MIB}).tensors")
    found = gpu_kernel.value("sorted((row.kind, row.size_bytes) for row in found)")
    expected = [("gradient", MIB), ("optimizer state", MIB), ("optimizer state", MIB), ("parameter", MIB)]
    assert found == expected
    run_ok(gpu_kernel, "del net, adam")


def test_an_inventory_makes_no_context_and_allocates_nothing(gpu_kernel: Kernel) -> None:
    """Taking an inventory allocates nothing on the device."""
    before = gpu_kernel.value("torch.cuda.memory_stats()['allocation.all.allocated']")
    run_ok(gpu_kernel, "import ipygpumem\nlen(ipygpumem.tensors().tensors)")
    assert gpu_kernel.value("torch.cuda.memory_stats()['allocation.all.allocated']") == before
    code = "import json, torch, ipygpumem; x = torch.ones(3); ipygpumem.tensors(); "
    assert script(code + "print(json.dumps(torch.cuda.is_initialized()))") is False


def test_an_inventory_comes_in_a_broken_context(figure: Callable[[str], None]) -> None:
    """After a device-side assert the inventory still comes, with the sizes that are known on the host."""
    code = (
        "import json, torch, ipygpumem\n"
        "x = torch.ones(1 << 20, device='cuda')\n"
        f"try: exec({breaking_context()!r})\n"
        "except RuntimeError as error: text = str(error)\n"
        "found = ipygpumem.tensors('x')\n"
        "print(json.dumps([text, [[row.size_bytes, row.note] for row in found.tensors]]))"
    )
    text, ((size, note),) = script(code)
    assert "device-side assert triggered" in text
    figure(f"in a broken context: {size} bytes, note {note!r}")
    assert size == 4 * MIB or note.startswith("could not be read")
