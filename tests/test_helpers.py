"""Helpers for notebooks and scripts: right figures or a reason, and no context that the user did
not make.
"""

import asyncio
import functools
import sys
import textwrap
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

import ipygpumem
from benchmarks.harness.kernel import Kernel
from ipygpumem import failures
from ipygpumem.errors import DeviceError, GpuMemError
from ipygpumem.failures import failures_told
from ipygpumem.probes.device_memory import DeviceMemory
from tests.alone import printed
from tests.fake_nvml import FakeNvml
from tests.fakes import FakeAllocator, FakeProbe, fake_torch


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Two cards of one model, of which 300 of 1000 and 1700 of 2000 bytes are free; torch is not
    loaded.
    """
    driver = FakeNvml()
    monkeypatch.setattr(driver, "nvmlDeviceGetName", lambda handle: "card")
    monkeypatch.setattr(driver, "nvmlDeviceGetUUID", lambda handle: handle, raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PYTORCH_NO_CUDA_MEMORY_CACHING"):
        monkeypatch.delenv(name, raising=False)
    return driver


def use_cuda(
    monkeypatch: pytest.MonkeyPatch, driver: FakeNvml, *, initialized: bool = True
) -> FakeAllocator:
    """Let torch have two devices, the driver's cards in the other order."""
    allocator = FakeAllocator(devices=2)
    torch = fake_torch(allocator, initialized=initialized)
    torch.cuda.memory_allocated = allocator.current.__getitem__
    torch.cuda.memory_reserved = allocator.reserved.__getitem__
    torch.cuda.current_device = lambda: 1
    monkeypatch.setitem(sys.modules, "torch", torch)
    driver.memory = {"GPU-uuid-1": (1000, 700), "GPU-uuid-0": (2000, 300)}
    driver.processes = {name: [] for name in driver.memory}
    return allocator


def test_the_hosts_memory_is_the_systems_figure() -> None:
    found = ipygpumem.memory()
    assert found.device == "cpu"
    assert 0 < (found.total_bytes or 0) <= psutil.virtual_memory().total
    assert found.total_bytes == (found.used_bytes or 0) + (found.free_bytes or 0)
    assert found.allocated_bytes == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)
    assert found.free_with_cache_bytes == found.free_bytes
    assert DeviceMemory.from_dict(found.to_dict()) == found


def test_a_device_unused_by_torch_is_read_through_the_driver(driver: FakeNvml) -> None:
    assert ipygpumem.memory("cuda:1") == DeviceMemory("cuda:1", 2000, 1700, 300, 0, 0)
    assert (
        ipygpumem.memory(0)
        == ipygpumem.memory("cuda")
        == DeviceMemory("cuda:0", 1000, 300, 700, 0, 0)
    )
    assert driver.shut_down


@pytest.mark.parametrize(
    ("visible", "totals"),
    [
        ("1,0", [2000, 1000]),
        ("GPU-b, GPU-a", [2000, 1000]),
        ("MIG-x", [500]),
        ("1,7,0", [2000]),
        (" 1 , 0", [2000, 1000]),
        ("0,-1,1", [1000]),
        ("NoDevFiles", []),
        ("1,1", []),
        ("GPU-", []),
        ("-1", []),
        ("", []),
    ],
)
def test_only_cards_visible_to_cuda_are_listed(
    driver: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str, totals: list[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [ipygpumem.memory(index).total_bytes for index in range(len(totals))] == totals
    with pytest.raises(DeviceError, match=f"^there is no cuda:{len(totals)} here$"):
        ipygpumem.memory(len(totals))


def test_an_order_of_cards_that_only_cuda_knows_is_no_guess(
    driver: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "nvmlDeviceGetName", str)
    found = ipygpumem.memory("cuda:0")
    assert (found.total_bytes, found.free_bytes, found.free_with_cache_bytes) == (None, None, None)
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in found.note
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert ipygpumem.memory("cuda:0").total_bytes == 1000


def test_a_device_that_torch_uses_has_a_cache(
    driver: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = use_cuda(monkeypatch, driver)
    allocator.allocate(100)
    allocator.allocate(-40)
    found = ipygpumem.memory("cuda:0")
    assert found == DeviceMemory("cuda:0", 2000, 1700, 300, 60, 100)
    assert found.free_with_cache_bytes == 1740
    assert ipygpumem.memory("cuda").device == "cuda:1"
    with pytest.raises(DeviceError, match="no cuda:2 here"):
        ipygpumem.memory(2)


def test_without_nvml_only_a_device_with_a_context_is_asked(
    driver: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.fail_init = True
    with pytest.raises(DeviceError, match=r"no cuda:0 here \(NVML: Driver Not Loaded\)"):
        ipygpumem.memory(0)
    use_cuda(monkeypatch, driver).allocate(100)
    assert ipygpumem.memory(0) == DeviceMemory("cuda:0", 1000, 850, 150, 100, 100)
    unknown = ipygpumem.memory(1)
    assert (unknown.total_bytes, unknown.free_bytes, unknown.note) == (
        1000,
        None,
        "NVML: Driver Not Loaded",
    )


FILL = """
import ipygpumem, sys
MIB = 1 << 20
def fits(size):
    try:
        bytearray(size)
    except MemoryError:
        return False
    return True
"""


def in_script(code: str) -> str:
    """Return the output of a script of its own: limits and RSS are those of a process."""
    return printed("-c", FILL + code).strip()


linux = pytest.mark.skipif(sys.platform != "linux", reason="limits on address space are Linux's")


@linux
def test_leave_free_leaves_this_process_the_requested_size() -> None:
    code = textwrap.dedent(
        """\
        with ipygpumem.leave_free('256 MiB', 'cpu'):
            inside = fits(250 * MIB), fits(260 * MIB)
        print(inside, fits(512 * MIB))"""
    )
    assert in_script(code) == "(True, False) True"


@linux
def test_leave_free_restores_the_users_limit_unless_changed() -> None:
    code = textwrap.dedent(
        """\
        import resource
        def limit(size): resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
        def now(): return resource.getrlimit(resource.RLIMIT_AS)[0] // MIB
        limit(8000 * MIB)
        with ipygpumem.leave_free('64 MiB', 'cpu'): inside = now() < 8000
        print(inside, now())
        with ipygpumem.leave_free('64 MiB', 'cpu'): limit(7000 * MIB)
        print(now())
        filler = ipygpumem.leave_free('64 MiB', 'cpu'); del filler; print(now())"""
    )
    assert in_script(code).split() == ["True", "8000", "7000", "7000"]


def test_leave_free_holds_host_memory_in_ram_until_it_ends() -> None:
    code = (
        "def rss(): return ipygpumem.memory().allocated_bytes // MIB\nbefore = rss()\n"
        "with ipygpumem.allocate('256 MiB', 'cpu') as held: inside = rss() - before\n"
        "print(250 <= inside <= 262, rss() - before < 6, held.size_bytes, ipygpumem.allocate(0, "
        "'cpu'))"
    )
    assert in_script(code) == f"True True {256 << 20} <cpu: 0 B reserved until free()>"


def test_the_last_of_the_hosts_memory_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ipygpumem.probes.host.available_bytes", lambda: 100 << 20)
    with pytest.raises(DeviceError, match="the host can spare only 95 MiB, not 99 MiB"):
        ipygpumem.allocate("99 MiB", "cpu")


class Big:
    """Something of which only weak references are kept."""


def make(watched: list[weakref.ref[Big]]) -> None:
    big = Big()
    watched.append(weakref.ref(big))
    raise PickyError(3, "enough")


class PickyError(Exception):
    """Its constructor takes more than a message."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code


def test_only_our_own_failure_ends_a_told_block(capsys: pytest.CaptureFixture[str]) -> None:
    failures.forget_told()
    with failures_told("a helper", "it does nothing"):
        raise ValueError("broken")
    assert capsys.readouterr().err == (
        "ipygpumem: a helper failed (ValueError: broken). "
        "Your code is not affected, but it does nothing.\n"
    )
    for users_error in (GpuMemError, KeyboardInterrupt, SystemExit):
        with pytest.raises(users_error), failures_told("a helper"):
            raise users_error
    assert capsys.readouterr().err == ""


def test_an_error_leaves_the_block_without_its_frames_locals() -> None:
    watched: list[weakref.ref[Big]] = []
    here = Big()
    with pytest.raises(PickyError) as caught, ipygpumem.clear_tracebacks():
        make(watched)
    assert (caught.value.code, caught.value.args, watched[0]()) == (3, (3, "enough"), None)
    assert [line.name for line in traceback.extract_tb(caught.value.__traceback__)][-1] == "make"
    assert here is not None


def test_arguments_of_a_decorated_function_die_despite_its_error() -> None:
    async def awaited(given: Big) -> None:
        raise PickyError(3, "enough")

    def generated(given: Big) -> Iterator[int]:
        raise PickyError(3, "enough")
        yield 1

    def plain(given: Big) -> None:
        raise PickyError(3, "enough")

    plain, awaited, generated = map(ipygpumem.clear_tracebacks, (plain, awaited, generated))  # type: ignore[assignment]
    # The call alone stands between the test and the function: frames of others would hold what they
    # were passed.
    for start, run in ((plain, None), (awaited, asyncio.run), (generated, next)):
        given = Big()
        watched = weakref.ref(given)
        with pytest.raises(PickyError) as error:
            _ = start(given) if run is None else run(start(given))
        del given
        assert watched() is None, start
        assert error.value.code == 3


def test_methods_are_decorated_above_and_below_staticmethod() -> None:
    for decorate in (ipygpumem.clear_tracebacks, ipygpumem.trace):

        class Some:
            one = decorate(staticmethod(lambda x: x))
            two = staticmethod(decorate(lambda x: x))
            three = decorate(classmethod(lambda cls, x: (cls, x)))
            four = decorate(lambda self, x: (self, x))

        some = Some()
        assert [Some.one(1), some.one(1), some.two(2)] == [1, 1, 2]
        assert [Some.three(3), some.three(3), some.four(4)] == [(Some, 3), (Some, 3), (some, 4)]


def test_stored_errors_are_released_in_a_notebook_and_a_script(bare_kernel: Kernel) -> None:
    make_big = textwrap.dedent(
        """\
        class Big: pass
        import weakref, ipygpumem
        def f():
            global seen
            big = Big()
        """
    )
    make_big += "    seen = weakref.ref(big)\n    1 / 0\n"
    for _ in range(2):
        assert bare_kernel.run(f"{make_big}f()").error == "ZeroDivisionError"
        assert bare_kernel.value("seen() is None") is False
        assert "released" in (bare_kernel.run("ipygpumem.clear_tracebacks()").result or "")
        assert bare_kernel.value("seen() is None") is True
        bare_kernel.run("%load_ext ipygpumem")
    code = textwrap.dedent(
        """\
        try: f()
        except ZeroDivisionError as error: sys.last_value = error
        ipygpumem.clear_tracebacks()
        """
    )
    assert in_script(f"{make_big}{code}print(seen(), 'IPython' in sys.modules)") == "None False"


async def until_done(x: int) -> int:
    await asyncio.sleep(0)
    return x


class Model:
    async def __call__(self, x: int) -> int:
        return await until_done(x)


@pytest.mark.parametrize("call", [Model(), functools.partial(Model())], ids=["object", "partial"])
def test_a_decorated_coroutine_is_covered_until_it_is_done(
    script_memory: FakeProbe, call: Any
) -> None:
    async def main(function: Any) -> int:
        waiting = function(7)
        script_memory.set(160)
        return int(await waiting)

    assert asyncio.run(main(ipygpumem.clear_tracebacks(call))) == 7
    script_memory.set(100)
    assert asyncio.run(main(ipygpumem.trace("call", silent=True)(call))) == 7
    assert ipygpumem.traces()[-1].usages[0].before_bytes == 160  # it begins when it is awaited


_HUGE = 10**5000  # Python refuses to write so many digits
_MOST = "no device has more than 8192.00 PiB"
_MISTAKES: list[tuple[Callable[[], object], str]] = [
    *(
        (functools.partial(ipygpumem.memory, name), "is not a device")
        for name in ("gpu:0", None, "9" * 10_000)
    ),
    (lambda: ipygpumem.memory(_HUGE), "a number of 16610 bits"),
    (lambda: ipygpumem.allocate("1 MiB", "tpu"), "is not a device"),
    (lambda: ipygpumem.allocate("9 PiB", "cpu"), "the host can spare"),
    (lambda: ipygpumem.allocate("9" * 90 + " bytes", "cpu"), _MOST),
    (
        lambda: ipygpumem.leave_free(1, "cpu"),
        "leave the host at least 32 MiB: Python itself needs some memory",
    ),
    (lambda: ipygpumem.leave_free("9 PiB", "cpu"), "cannot stay free"),
    (lambda: ipygpumem.leave_free(None, "cpu"), "not an object of type NoneType"),  # type: ignore[arg-type]
    (lambda: ipygpumem.tracker(top=None), "top: an object of type NoneType is not a whole number"),  # type: ignore[arg-type]
    (
        lambda: ipygpumem.tensors(device="RAMM"),
        "'RAMM' is not a device: write RAM or a name such as cuda:0",
    ),
    (lambda: ipygpumem.tensors(min_bytes=True), "not an object of type bool"),
    (
        lambda: ipygpumem.tensors(kind="x"),
        "write one of parameter, gradient, optimizer state, buffer, other",
    ),
    (lambda: ipygpumem.tensors(3), "names as strings, such as"),  # type: ignore[arg-type]
    (lambda: ipygpumem.diff(ipygpumem.tensors("no such"), 2), "diff takes two inventories"),  # type: ignore[arg-type]
    (lambda: ipygpumem.budget(), "name a device, such as"),
    (lambda: ipygpumem.budget(gpu=_HUGE), f"budget: gpu: {_MOST}"),
]
"""Numbers, sizes and devices of every kind are checked in test_units.py and test_accelerators.py.
"""


@pytest.mark.parametrize(("call", "said"), _MISTAKES)
def test_any_wrong_argument_gives_one_short_line(call: Callable[[], object], said: str) -> None:
    with pytest.raises(GpuMemError) as caught:
        call()
    assert said in str(caught.value)
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)
