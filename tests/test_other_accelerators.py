"""torch's devices without a probe of their own: a real PrivateUse1 backend, and a stand-in for torch.accelerator."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest

from ipygpumem.probes.accelerators import other_accelerator
from ipygpumem.probes.pools import finder
from ipygpumem.units import GIB, MIB
from tests.fakes import fake_module

PLUGIN = """
import types
import torch, ipygpumem
from ipygpumem.freeing.reclaim import empty_device_caches
from ipygpumem.probes.host import HostProbe
from ipygpumem.measuring.meter import Meter
from ipygpumem.probes.pools import finder
from ipygpumem.reconcile import findings

state = {"begun": False, "now": [0, 0], "high": [0, 0], "reserved": [0, 0], "asked": 0, "emptied": 0}

def told(what):
    def tell(index=None):
        assert state["begun"], f"{what} would initialise the device"
        state["asked"] += 1
        return state[what][index]
    return tell

def empty():
    assert state["begun"], "emptying would initialise the device"
    state["emptied"] += 1
    state["reserved"] = list(state["now"])

def take(size, index=0):
    state["now"][index] += size
    for what in ("high", "reserved"):
        state[what][index] = max(state[what][index], state["now"][index])

with ipygpumem.trace("before", silent=True): pass
module = types.ModuleType("torch.npu")
module.is_available = lambda: True
module.device_count = lambda: 2
module.is_initialized = lambda: state["begun"]
module.memory_allocated, module.max_memory_allocated = told("now"), told("high")
module.memory_reserved, module.empty_cache = told("reserved"), empty
torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", module)
assert str(torch.accelerator.current_accelerator()) == "npu"

with ipygpumem.trace("registered", silent=True): pass
empty_device_caches()
assert [usage.device for usage in ipygpumem.traces()[-1].usages] == ["cpu"]
assert (state["asked"], state["emptied"]) == (0, 0)

state["begun"] = True
with ipygpumem.trace("used", silent=True):
    take(64 << 20, 1)
    take(-(16 << 20), 1)
usages = {usage.device: usage for usage in ipygpumem.traces()[-1].usages}
assert list(usages) == ["cpu", "npu:0", "npu:1"], usages
one = usages["npu:1"]
assert (one.delta_bytes, one.peak_delta_bytes, one.reserved_bytes) == (48 << 20, 64 << 20, 64 << 20), one
assert one.method == "sampled"

meter = Meter([HostProbe()], find_more=finder())
found = findings.reconcile(lambda: meter.now(detail=True), lambda: [])
assert not found.failures, found.failures
(parts,) = [item for item in found.reconciliations if item.device == "npu:1"]
assert parts.total_bytes == 64 << 20, parts
assert sum(part.size_bytes or 0 for part in parts.parts) == 64 << 20, parts
meter.close()
empty_device_caches()
assert (state["emptied"], state["reserved"]) == (1, state["now"])
"""


def test_a_plug_ins_devices_are_measured_once_they_are_initialised_and_not_before() -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("this test needs torch, which comes with the extra 'torch'")
    done = subprocess.run([sys.executable, "-c", PLUGIN], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("knows", [True, False])
def test_torch_accelerator_tells_where_it_knows_the_allocator(monkeypatch: pytest.MonkeyPatch, *, knows: bool) -> None:
    generic = SimpleNamespace(
        memory_allocated=lambda index: 32 * MIB,
        max_memory_allocated=lambda index: 48 * MIB,
        memory_reserved=lambda index: 64 * MIB,
    )
    device = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 1,
        memory_allocated=lambda index: MIB,
        get_device_properties=lambda index: SimpleNamespace(total_memory=GIB),
    )
    library = SimpleNamespace(
        _accelerator_getAccelerator=lambda: SimpleNamespace(type="mtia"),
        _accelerator_isAllocatorInitialized=lambda: knows,
    )
    monkeypatch.setitem(sys.modules, "torch", fake_module(_C=library, accelerator=generic, mtia=device))
    (probe,) = [probe for probe in finder()() if getattr(probe, "name", "") == "torch"]
    (reading,) = probe.read()
    figures = (reading.device, reading.current_bytes, reading.reserved_bytes, reading.total_bytes)
    assert figures == (("mtia:0", 32 * MIB, 64 * MIB, GIB) if knows else ("mtia:0", MIB, None, GIB))


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_devices_with_probes_of_their_own_are_not_read_twice(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    library = SimpleNamespace(_accelerator_getAccelerator=lambda: SimpleNamespace(type=kind))
    monkeypatch.setitem(sys.modules, "torch", fake_module(_C=library))
    assert other_accelerator() == ""
