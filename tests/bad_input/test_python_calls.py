"""A wrong argument of a Python function gives one short line."""

import functools
from collections.abc import Callable

import pytest

import ipygpumem
from ipygpumem.errors import GpuMemError

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
    # A message of one or two lines, however large the argument.
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)
