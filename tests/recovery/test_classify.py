"""Recognition of out-of-memory errors and broken device contexts; stand-ins for released
tracebacks.
"""

import asyncio
import builtins
import sys
import textwrap
import traceback
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from types import FunctionType, TracebackType

import pytest

from ipygpumem.reclaim.failure import classify
from ipygpumem.reclaim.traceback_copies import copy_without_frames
from tests.hostile import Hostile, Meta, body, made, trap, untouched


def _named(name: str, *bases: type) -> type[BaseException]:
    return type(name, bases or (RuntimeError,), {})


_LIMIT = "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 9.43 GiB\n"  # noqa: E501
_CPU = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: "
_ASYNC = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"
_JAX = "RESOURCE_EXHAUSTED: Out of memory "
_CUPY = "Out of memory allocating 8,589,934,592 bytes (allocated so far: 0 bytes)."
_MPS = (
    "MPS backend out of memory (MPS allocated: 8.00 GB). Tried to allocate 2.00 GB on private pool."
)


@pytest.mark.parametrize(
    ("name", "text", "requested"),
    [
        ("MemoryError", "", None),
        (
            "OutOfMemoryError",
            "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total of 139 GiB",
            5 << 29,
        ),
        (
            "RuntimeError",
            "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 1.00 GiB total capacity)",
            20 << 20,
        ),
        (
            "OutOfMemoryError",
            f"{_LIMIT}Requested               : 640.00 MiB\nDevice limit : 12.00 GiB",
            640 << 20,
        ),
        ("RuntimeError", "XPU out of memory. Tried to allocate 512.00 MiB", 512 << 20),
        ("RuntimeError", _MPS, 2 << 30),
        (
            "RuntimeError",
            f"{_CPU}can't allocate memory: you tried to allocate 4398046511104 bytes. Error",
            1 << 42,
        ),
        ("RuntimeError", f"{_CPU}not enough memory: you tried to allocate 800 bytes.", 800),
        (
            "RuntimeError",
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            None,
        ),
        ("AcceleratorError", _ASYNC, None),
        ("XlaRuntimeError", f"{_JAX}while trying to allocate 68719476736 bytes.", 1 << 36),
        ("JaxRuntimeError", f"{_JAX}allocating 1048576 bytes", 1 << 20),
        ("OutOfMemoryError, of MemoryError", _CUPY, 1 << 33),
        ("CUDARuntimeError", "cudaErrorMemoryAllocation: out of memory", None),
        ("MySpecialError, of MemoryError", "", None),
    ],
)
def test_an_out_of_memory_error_of_any_library_is_known(
    name: str, text: str, requested: int | None
) -> None:
    name, _, base = name.partition(", of ")
    kind = getattr(builtins, name, None) or _named(name, getattr(builtins, base or "RuntimeError"))
    error = kind(text)
    failure = classify(error)
    assert failure.kind == "oom"
    assert failure.requested_bytes == requested
    assert failure.poisoned is False
    wrapped = ValueError("training failed")
    wrapped.__context__ = error
    assert classify(wrapped).kind == "oom"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("out of memory is what I write about"),
        KeyError("CUDA out of memory"),
        RuntimeError("shapes do not match"),
        RuntimeError(),
        _named("Memory")("out of luck"),
        OSError(28, "No space left on device"),
        RuntimeError(MemoryError),
        StopIteration(3),
    ],
    ids=repr,
)
def test_other_errors_are_not_taken_for_an_oom(error: BaseException) -> None:
    failure = classify(error)
    assert failure.kind == "error"
    assert failure.requested_bytes is None
    assert failure.poisoned is False


@pytest.mark.parametrize("name", ["RuntimeError", "AcceleratorError"])
@pytest.mark.parametrize(
    "text",
    [
        "device-side assert triggered",
        "an illegal memory access was encountered",
        "uncorrectable ECC error",
    ],
)
def test_a_broken_context_is_known_also_behind_another_error(name: str, text: str) -> None:
    error = (RuntimeError if name == "RuntimeError" else _named(name))(f"CUDA error: {text}")
    assert classify(error).poisoned
    wrapped = ValueError("training failed")
    wrapped.__cause__ = error
    assert classify(wrapped).poisoned
    interrupted = KeyboardInterrupt()
    interrupted.__context__ = error
    assert classify(interrupted).poisoned


_HELP = (
    "\nSearch for `{name}' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more "  # noqa: E501
    "information."
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "  # noqa: E501
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"
    "\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
"""Text that torch adds to each CUDA error."""


@pytest.mark.parametrize(
    ("text", "name", "kind"),
    [
        ("CUDA error: out of memory", "cudaErrorMemoryAllocation", "oom"),
        ("CUDA error: invalid argument", "cudaErrorInvalidValue", "error"),
        (
            "CUDA error: no kernel image is available for execution on the device",
            "cudaErrorNoKernelImage",
            "error",
        ),
        (
            "CUDA error: operation failed due to a previous error during capture",
            "cudaErrorStreamCapture",
            "error",
        ),
    ],
)
def test_torchs_usual_cuda_error_text_is_no_broken_context(text: str, name: str, kind: str) -> None:
    error = _named("AcceleratorError")(text + _HELP.format(name=name))
    assert (classify(error).kind, classify(error).poisoned) == (kind, False)
    told = "CUDA error: device-side assert triggered" + _HELP.format(name="cudaErrorAssert")
    broken = _named("AcceleratorError")(told)
    assert classify(broken).poisoned
    assert classify(
        RuntimeError("CUDA device-side assertion failures were found on GPU #0!")
    ).poisoned


def test_a_users_text_about_a_broken_context_is_none() -> None:
    assert not classify(ValueError("illegal memory access is explained in chapter 3")).poisoned


def test_classifying_runs_no_code_of_the_exceptions_own() -> None:
    traps = {name: property(trap(name)) for name in ("args", "__traceback__")}
    error = MemoryError.__new__(
        Meta("Oom", (MemoryError,), body | traps), (1 << 20, 4), made(Hostile)
    )
    with untouched():
        assert classify(error).kind == "oom"


def _raised(code: str) -> BaseException:
    """Return the error that ``code`` raises."""
    names = {
        "asyncio": asyncio,
        "futures": futures,
        "sys": sys,
        "group": vars(builtins).get("BaseExceptionGroup"),
    }
    try:
        exec(textwrap.dedent(code), names)
    except BaseException as error:
        return error
    raise AssertionError("no error")


_INTERRUPTED = "try:\n    raise KeyboardInterrupt\n"
INTERRUPTS = {
    "Ctrl-C": "raise KeyboardInterrupt",
    "Lightning": f"{_INTERRUPTED}except KeyboardInterrupt: sys.exit(1)",
    "an error behind it": f"{_INTERRUPTED}except KeyboardInterrupt: raise RuntimeError('training stopped')",  # noqa: E501
    "from None": f"{_INTERRUPTED}except KeyboardInterrupt: raise RuntimeError from None",
    "several levels": f"{_INTERRUPTED}except BaseException:\n    try: 1 / 0\n    except ZeroDivisionError as error:\n"  # noqa: E501
    "        try: raise ValueError from error\n        finally: sys.exit()",
    "with": textwrap.dedent(
        """\
        class Block:
            def __enter__(self): pass
            def __exit__(self, *error): raise OSError('no disk')
        with Block(): raise KeyboardInterrupt"""
    ),
    "a subclass": "class Stop(KeyboardInterrupt): pass\nraise Stop",
    "a cancelled cell": "raise asyncio.CancelledError",
    "while memory had run out": textwrap.dedent(
        """\
        try:
            try: raise MemoryError
            except MemoryError: raise KeyboardInterrupt
        except KeyboardInterrupt: sys.exit(1)"""
    ),
    "groups": "raise group('outer', [ValueError(), group('inner', [KeyboardInterrupt()])])",
    "in a group's context": f"{_INTERRUPTED}except KeyboardInterrupt: raise group('all', [ValueError()])",  # noqa: E501
    "behind a group's member": f"{_INTERRUPTED}except KeyboardInterrupt as error:\n    try: 1 / 0\n"
    "    except ZeroDivisionError as other: failed = other\nraise group('all', [failed])",
}
_WAITING = "async def wait(): await asyncio.sleep(9)\n"
ERRORS = {
    "exit": "sys.exit(1)",
    "a timeout": f"{_WAITING}asyncio.run(asyncio.wait_for(wait(), 0.001))",
    "an error behind a timeout": f"{_WAITING}try: asyncio.run(asyncio.wait_for(wait(), 0.001))\n"
    "except asyncio.TimeoutError: raise RuntimeError('too slow')",
    "a task group": textwrap.dedent(
        """\
        async def fail(): 1 / 0
        async def main():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fail())
                await asyncio.sleep(9)
        asyncio.run(main())"""
    ),
    "a cancelled future": "future = futures.Future()\nfuture.cancel()\nfuture.result()",
    "a handled Ctrl-C": f"{_INTERRUPTED}except KeyboardInterrupt: pass\n1 / 0",
}
_NEEDS_3_11 = {
    name
    for name, code in {**INTERRUPTS, **ERRORS}.items()
    if "roup(" in code or "TaskGroup" in code
}


@pytest.mark.parametrize("name", [*INTERRUPTS, *ERRORS])
def test_a_ctrl_c_counts_anywhere_in_the_chain_a_timeout_nowhere(name: str) -> None:
    if name in _NEEDS_3_11 and sys.version_info < (3, 11):
        pytest.skip("groups came with Python 3.11")
    failure = classify(_raised({**INTERRUPTS, **ERRORS}[name]))
    assert failure.kind == ("interrupt" if name in INTERRUPTS else "error")


@pytest.mark.parametrize(
    "code",
    [
        f"{_INTERRUPTED}except KeyboardInterrupt: raise MemoryError",
        "raise group('outer', [KeyboardInterrupt(), MemoryError()])"
        if sys.version_info >= (3, 11)
        else "raise MemoryError",
        """\
ran_out = MemoryError()
ran_out.__context__ = KeyboardInterrupt()
ran_out.__context__.__context__ = ran_out
raise ran_out""",
    ],
)
def test_memory_that_runs_out_after_a_ctrl_c_is_an_oom(code: str) -> None:
    assert classify(_raised(code)).kind == "oom"


def fail() -> None:
    raise ValueError


def traceback_of(function: FunctionType) -> TracebackType:
    with pytest.raises(ValueError) as caught:  # it has no message
        function()
    traceback = caught.tb.tb_next
    assert traceback is not None
    return traceback


def test_generated_code_without_lines_gets_a_stand_in() -> None:
    assert isinstance(fail, FunctionType)
    without_lines = FunctionType(
        fail.__code__.replace(co_linetable=b""), {"ValueError": ValueError}
    )
    made = copy_without_frames(traceback_of(without_lines))
    assert made is not None
    assert (made.tb_frame.f_code.co_name, made.tb_lineno) == ("fail", 1)
    assert traceback.format_tb(made)


SOURCE = """
def inner(x, *, y=1, **more):
    z = [1, 2]

    def deep(a):
        return x[a] + (lambda: z[a +   1 * 5] + len('äöü'))()
    return [deep(i) for i in range(1)]

def gen():
    yield 1
    for i in range(3):
        w = inner(
            [1], y="ä", much=__________________________________________________________________________________________
        ) ; w = 3

class A:
    list(gen())
"""  # noqa: E501


def entries(made: TracebackType | None) -> Iterator[TracebackType]:
    while made is not None:
        yield made
        made = made.tb_next


def test_a_stand_in_shows_the_same_and_refers_to_no_frame(tmp_path: Path) -> None:
    file = tmp_path / "failing.py"
    file.write_text(SOURCE)
    with pytest.raises(IndexError) as caught:
        exec(compile(SOURCE, str(file), "exec"), {"__name__": "failing", "_" * 90: 0})
    real = caught.tb.tb_next
    made = copy_without_frames(caught.tb.tb_next)
    assert traceback.format_tb(made) == traceback.format_tb(real)
    for entry, shown in zip(entries(made), entries(real), strict=True):
        frame = entry.tb_frame
        real_frame = shown.tb_frame
        # some show the one, some the other
        assert frame.f_lineno == entry.tb_lineno == shown.tb_lineno
        assert frame.f_globals.keys() <= {"__name__"}
        assert (frame.f_back, dict(frame.f_locals)) == (None, {})
        if sys.version_info >= (3, 11):
            assert frame.f_code.co_qualname == real_frame.f_code.co_qualname
            assert frame.f_code.co_firstlineno == real_frame.f_code.co_firstlineno
