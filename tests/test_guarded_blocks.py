"""Blocks and decorators: a user's error passes unchanged, without the locals of its frames."""

import asyncio
import functools
import textwrap
import traceback
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import ipygpumem
from benchmarks.harness.kernel import Kernel
from ipygpumem import failures
from ipygpumem.errors import GpuMemError
from ipygpumem.failures import failures_told
from tests.alone import printed
from tests.fakes import FakeProbe


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
    assert caught.value.code == 3
    assert caught.value.args == (3, "enough")
    assert watched[0]() is None
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
    script = f"import sys\n{make_big}{code}print(seen(), 'IPython' in sys.modules)"
    assert printed("-c", script) == "None False\n"


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
