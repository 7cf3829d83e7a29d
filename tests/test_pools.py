"""Pools of JAX, CuPy, RMM and TensorFlow (stand-ins; JAX itself on the CPU), and probes that users
register.
"""

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import ipygpumem
from ipygpumem.errors import ProbeError
from ipygpumem.inventory.devices.device_parts import device_parts, pools_on
from ipygpumem.meter.meter import Meter
from ipygpumem.probes import pools as plugins
from ipygpumem.probes.accelerators import WholeDevice
from ipygpumem.probes.pools import PluginProbe, finder_of_probes
from ipygpumem.reclaim.emptying import empty_device_caches
from ipygpumem.records import Reading
from ipygpumem.units import GIB, MIB
from tests.alone import printed
from tests.fakes import FakeProbe


@dataclass
class Library:
    in_use: int = 0
    highest: int = 0
    reserved: int = 0
    is_begun: bool = True
    called: list[str] = field(default_factory=list)

    def take(self, size: int) -> None:
        self.in_use += size
        self.highest = max(self.highest, self.in_use)
        self.reserved = max(self.reserved, self.in_use)

    def free_all_blocks(self) -> None:
        self.called.append("free")
        self.reserved = self.in_use


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put modules into ``sys.modules``; others of these libraries are not there."""
    for name in ("jax", "cupy", "rmm", "tensorflow"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def load(**modules: dict[str, Any]) -> None:
        for name, attributes in modules.items():
            module = ModuleType(name.replace("__", "."))
            vars(module).update(attributes)
            monkeypatch.setitem(sys.modules, name.replace("__", "."), module)

    return load


def load_jax(load: Callable[..., None], library: Library) -> None:
    def stats() -> dict[str, int]:
        sizes = {"bytes_in_use": library.in_use, "peak_bytes_in_use": library.highest}
        return {**sizes, "pool_bytes": library.reserved, "bytes_limit": 18 * GIB}

    def local_devices() -> list[Any]:
        library.is_begun = True  # JAX makes its backend now, if there is none
        return [SimpleNamespace(id=0, local_hardware_id=0, platform="gpu", memory_stats=stats)]

    load(jax={"local_devices": local_devices}, jax___src__xla_bridge={})
    vars(sys.modules["jax._src.xla_bridge"])["backends_are_initialized"] = lambda: library.is_begun


def load_cupy(load: Callable[..., None], library: Library, *, capturing: bool = False) -> None:
    pool = SimpleNamespace(used_bytes=lambda: library.in_use, total_bytes=lambda: library.reserved)
    pool.get_limit = lambda: 0
    pool.free_all_blocks = library.free_all_blocks
    pinned = SimpleNamespace(free_all_blocks=lambda: library.called.append("free pinned"))
    cuda = SimpleNamespace(
        is_available=lambda: library.is_begun, runtime=SimpleNamespace(getDevice=lambda: 1)
    )
    cuda.get_current_stream = lambda: SimpleNamespace(is_capturing=lambda: capturing)
    load(
        cupy={
            "cuda": cuda,
            "get_default_memory_pool": lambda: pool,
            "get_default_pinned_memory_pool": lambda: pinned,
        }
    )


def load_rmm(load: Callable[..., None], library: Library) -> None:
    def resource() -> Any:
        counts = SimpleNamespace(current_bytes=library.in_use, peak_bytes=library.highest)
        return SimpleNamespace(**({"allocation_counts": counts} if library.is_begun else {}))

    load(rmm={"mr": SimpleNamespace(get_current_device_resource=resource)})


def load_tensorflow(load: Callable[..., None], library: Library) -> None:
    def info(device: str) -> dict[str, int]:
        assert device == "GPU:0"
        library.called.append("info")
        return {"current": library.in_use, "peak": library.highest}

    more = SimpleNamespace(get_memory_info=info)
    config = SimpleNamespace(list_logical_devices=lambda kind: ["/device:GPU:0"], experimental=more)
    load(tensorflow={"config": config}, tensorflow__python__eager__context={})
    vars(sys.modules["tensorflow.python.eager.context"])["_context"] = SimpleNamespace(
        _initialized=library.is_begun
    )


LOAD = {"jax:0": load_jax, "cupy:1": load_cupy, "rmm": load_rmm, "tensorflow:0": load_tensorflow}


@pytest.mark.parametrize("device", LOAD)
def test_a_library_is_read_only_after_it_was_initialised(device: str, loaded: Any) -> None:
    library = Library(is_begun=False)

    # Without the library there is no probe.
    find = finder_of_probes()
    assert [probe for probe in find() if hasattr(probe, "name")] == []
    LOAD[device](loaded, library)
    (probe,) = [probe for probe in find() if hasattr(probe, "name")]
    assert [probe for probe in find() if hasattr(probe, "name")] == [], "found once"

    # It is not asked before it is initialised.
    assert probe.read() == ()
    assert probe.sampled is False
    assert not library.is_begun
    assert library.called == []

    # Then it is read.
    library.is_begun = True
    LOAD[device](loaded, library)
    library.take(64 * MIB)
    (reading,) = probe.read()
    assert reading.device == device
    assert reading.current_bytes == 64 * MIB
    assert reading.peak_bytes == 64 * MIB
    assert reading.method == "sampled"
    assert probe.sampled is True


@pytest.mark.parametrize("device", sorted(set(LOAD) - {"cupy:1"}))
def test_a_span_with_a_new_highest_peak_is_exact_without_a_reset(device: str, loaded: Any) -> None:
    library = Library()
    LOAD[device](loaded, library)

    # The highest use before the span.
    library.take(512 * MIB)
    library.take(-512 * MIB)
    meter = Meter([], find_more=finder_of_probes(), sample_seconds=600)
    try:
        span = meter.span()
        library.take(64 * MIB)
        (usage,) = [usage for usage in span.read() if usage.device == device]
        assert (usage.delta_bytes, usage.peak_delta_bytes) == (64 * MIB, 64 * MIB), (
            "not what was before the span"
        )

        # A new highest use inside it.
        library.take(704 * MIB)
        library.take(-704 * MIB)
        (usage,) = [usage for usage in span.stop() if usage.device == device]
    finally:
        meter.close()
    assert usage.delta_bytes == 64 * MIB
    assert usage.peak_delta_bytes == 768 * MIB
    assert usage.method == "sampled"
    assert library.highest == 768 * MIB


def reading(device: str, current: int, reserved: int | None, **more: Any) -> Reading:
    return Reading(device, current, current, "allocator", reserved_bytes=reserved, **more)


def test_parts_of_two_libraries_on_one_device_add_up() -> None:
    wide = WholeDevice(24 * GIB, 12 * GIB, own_bytes=10 * GIB, other_processes=((7, 2 * GIB),))
    own = reading("cuda:0", GIB, 2 * GIB, total_bytes=24 * GIB, used_bytes=12 * GIB)
    readings = {name: reading(name, GIB, 5 * GIB) for name in ("jax:0", "jax:1")}
    readings |= {"cuda:0": own, "rmm": reading("rmm", 512 * MIB, None)}
    memory = device_parts(own, None, wide, None, (), pools_on(0, readings))
    sizes = {part.name: part.size_bytes for part in memory.parts}
    assert sum(size for size in sizes.values() if size) == memory.total_bytes == 24 * GIB
    assert sizes["JAX: in use"] == GIB
    assert sizes["JAX: pool's rest"] == 4 * GIB
    assert sizes["RMM: in use"] == 512 * MIB
    assert sizes["context and libraries"] == 10 * GIB - 2 * GIB - 5 * GIB - 512 * MIB
    assert [part.name for part in pools_on(1, {**readings, "cuda:1": own})] == [
        "JAX: in use",
        "JAX: pool's rest",
    ]


@pytest.mark.parametrize(("capturing", "called"), [(False, ["free", "free pinned"]), (True, [])])
def test_cupys_pools_are_emptied_unless_a_graph_is_captured(
    loaded: Any, capturing: bool, called: list[str]
) -> None:
    library = Library()
    load_cupy(loaded, library, capturing=capturing)
    empty_device_caches()
    assert library.called == called


SCRIPT = """
import os, sys
import ipygpumem, numpy
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
with ipygpumem.trace("before", silent=True): pass
import jax
import jax.numpy as jnp
with ipygpumem.trace("loaded", silent=True): pass

def listed():
    return [row for row in ipygpumem.tensors().tensors if row.library == "jax"]

assert listed() == []
assert not sys.modules["jax._src.xla_bridge"].backends_are_initialized(), "we made JAX's backend"
with ipygpumem.trace("used", silent=True): x = jnp.ones((1024, 1024)).block_until_ready()
used = ipygpumem.traces()[-1].usages
assert [usage.device for usage in used if usage.device != "cpu"] == [], used
assert used[0].delta_bytes > 4 << 20, used
del x

weights = {"layer": [jnp.ones((1024, 256))]}
same = jax.device_put(weights["layer"][0], jax.devices()[0])
shown = numpy.asarray(same)
outside = numpy.ones(1 << 18)
rows = {row.name: row for row in ipygpumem.tensors(min_bytes=1 << 18).tensors}
(row,) = [row for row in rows.values() if row.library == "jax"]
assert row.name in ("same", 'weights["layer"][0]'), row
assert (row.size_bytes, row.shape, row.dtype, row.device) == (1 << 20, (1024, 256), "float32", "cpu")
assert row.aliases == 2, row  # the second array of the buffer, and NumPy's view of it
assert rows["outside"].library == "numpy"
assert "shown" not in rows

mesh = jax.sharding.Mesh(numpy.array(jax.devices()), ("x",))
spread = jax.device_put(jnp.ones((4, 1 << 18)), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
spread.block_until_ready()
(row,) = [row for row in listed() if row.name == "spread"]
assert (row.size_bytes, row.note) == (4 << 20, "on 4 devices: the bytes of all"), row

spread.delete()
del weights, same, shown, row, rows
assert not [row for row in listed() if row.size_bytes >= 1 << 20], listed()

@jax.jit
def traced(x):
    ipygpumem.tensors()  # a tracer is no array
    return x * 2
traced(jnp.ones(8))

def make():
    held = jnp.zeros((512, 1024))
    yield held
maker = make(); next(maker)  # an array that no name leads to
(row,) = [row for row in listed() if row.size_bytes == 2 << 20]
"""  # noqa: E501


def test_arrays_of_jax_are_listed_once_without_making_a_backend() -> None:
    printed("-c", SCRIPT)


class Toy(FakeProbe):
    """A device of somebody's."""

    def __init__(self, device: str = "toy:0") -> None:
        super().__init__(device)


class Raises(Toy):
    def read(self, **how: Any) -> Any:
        raise SystemExit("enough")


class Unsayable(Toy):
    class Error(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def read(self, **how: Any) -> Any:
        raise self.Error


LIES: dict[str, Any] = {
    "not Readings": [("toy", 1, 2, "kernel")],
    "another's device": [Reading("cuda:0", 1, 1, "kernel")],
    "a share": [Reading("toy", 0.5, 1, "kernel")],  # type: ignore[arg-type]
    "a peak below": [Reading("toy", 2, 1, "kernel")],
    "more than there is": [Reading("toy", 20, 20, "kernel", 10)],
    "a method of its own": [Reading("toy", 1, 1, "guessed")],  # type: ignore[arg-type]
    "nothing to go through": None,
}


@pytest.mark.parametrize("answer", LIES.values(), ids=LIES)
def test_an_impossible_figure_of_a_probe_is_ignored(meter: Meter, answer: Any) -> None:
    liar = Toy()
    liar.read = lambda **how: answer  # type: ignore[method-assign]
    meter.add(PluginProbe("toy", liar))
    assert [usage.device for usage in meter.span().stop()] == ["cpu"]
    assert list(meter.failures) == ["toy"]


@pytest.mark.parametrize(
    ("probe", "said"), [(Raises(), "SystemExit: enough"), (Unsayable(), "Error")]
)
def test_a_probe_that_raises_is_named_and_other_probes_continue(
    meter: Meter, probe: Any, said: str
) -> None:
    meter.add(PluginProbe("toy", probe))
    assert [usage.device for usage in meter.span().stop()] == ["cpu"]
    assert meter.failures == {"toy": said}


def test_a_broken_probe_is_refused_at_registration(script_memory: FakeProbe) -> None:
    with pytest.raises(ProbeError, match="SystemExit: enough"):
        ipygpumem.register_probe("toy", Raises())


@pytest.mark.parametrize("method", ["rearm", "close"])
def test_an_error_of_a_property_of_a_probe_is_the_probes(method: str) -> None:
    def fail(probe: Toy) -> Callable[[], None]:
        raise SystemExit("enough")

    probe = type("Failing", (Toy,), {method: property(fail)})()
    with pytest.raises(ProbeError, match="SystemExit: enough"):
        getattr(PluginProbe("toy", probe), method)()


def test_a_slow_probe_is_dropped_with_one_warning(
    meter: Meter, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter.add(PluginProbe("toy", Toy()))
    monkeypatch.setattr(plugins, "_MOST_SECONDS", -1.0)
    with pytest.warns(RuntimeWarning, match=r"the probe 'toy': took .+ s, so it is no longer used"):
        meter.now()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(meter.now()) == ["cpu"]
    assert "is no longer used" in meter.failures["toy"]


def test_a_probe_that_answers_again_is_measured_again(meter: Meter) -> None:
    toy = Toy()
    reads, toy.read = toy.read, Raises().read  # type: ignore[method-assign]
    meter.add(PluginProbe("toy", toy))
    assert list(meter.now()) == ["cpu"]
    toy.read = reads  # type: ignore[method-assign]
    assert list(meter.now()) == ["cpu", "toy:0"]
    assert not meter.failures


@pytest.mark.parametrize("name", ["cpu", "cuda", "cuda:1", "", "a b", "<b>", 3])
def test_a_name_that_is_ours_or_none_is_refused(name: Any) -> None:
    with pytest.raises(ProbeError, match="a probe needs a name"):
        PluginProbe(name, Toy)


def test_a_second_probe_of_a_name_takes_the_first_ones_place(meter: Meter) -> None:
    first = Toy()
    second = Toy("toy:1")
    meter.add(PluginProbe("toy", first))
    span = meter.span()
    first.spike(500)
    meter.add(PluginProbe("toy", second))
    assert list(meter.now()) == ["cpu", "toy:1"]
    assert span.peaks["toy:0"] == 500
    span.close()
    assert first.closed
    meter.close()
    assert second.closed
    assert not meter.now()


@pytest.mark.usefixtures("others_out_of_sight")
def test_a_probe_or_its_failure_is_in_the_status(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its line after a cell is in docs/memory-reference.md, whose cells run as tests."""

    def status() -> str:
        capsys.readouterr()
        shell.run_line_magic("gpumem", "status")
        return capsys.readouterr().out

    shell.run_line_magic("load_ext", "ipygpumem")
    toy = Toy()
    toy.set(64)
    ipygpumem.register_probe("toy", toy)
    # and nothing of what it consists of
    (row,) = [line for line in status().splitlines() if "toy:0" in line]
    assert row.split()[:3] == ["toy:0", "64", "B"]
    toy.read = Raises().read  # type: ignore[method-assign]
    assert "toy cannot be read: SystemExit: enough" in status()
