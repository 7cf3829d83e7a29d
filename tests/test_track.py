"""A tracked loop measures each iteration, and stays the loop that it was."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import ipygpumem
from ipygpumem.api import loops
from ipygpumem.errors import TraceError
from tests.fakes import FakeProbe
from tests.kernel import Kernel

MIB = 1 << 20


def kept(tracked: Any) -> list[tuple[int | None, int, int]]:
    records = tracked.records
    return [(r.iteration, r.usages[0].delta_bytes, r.usages[0].peak_delta_bytes) for r in records]


def test_each_iteration_is_measured_with_what_fetching_its_item_took(script_memory: FakeProbe) -> None:
    def batches() -> Iterator[int]:
        for number in range(3):
            script_memory.set(100 + 10 * number)
            yield number

    loop = ipygpumem.track(batches(), "epoch", silent=True)
    for number in loop:
        script_memory.spike(200 + number)
    assert kept(loop) == [(1, 0, 100), (2, 10, 101), (3, 10, 92)]
    assert ipygpumem.traces() == list(loop.records)
    assert {record.label for record in loop.records} == {"epoch"}


def test_it_is_as_long_as_what_it_loops_over_and_may_run_again(script_memory: FakeProbe) -> None:
    loop = ipygpumem.track([1, 2], silent=True)
    assert len(loop) == 2
    assert [*loop, *loop] == [1, 2, 1, 2]
    assert [record.iteration for record in loop.records] == [1, 2]
    with pytest.raises(TypeError, match="has no len"):
        len(ipygpumem.track(iter([1])))


def test_a_break_and_an_error_end_it_after_the_iteration_they_came_in(script_memory: FakeProbe) -> None:
    loop = ipygpumem.track(range(5), silent=True)
    for number in loop:
        script_memory.set(100 + number)
        if number == 1:
            break
    assert kept(loop) == [(1, 0, 0), (2, 1, 1)]

    def fails() -> None:
        for number in loop:
            if number == 2:
                raise KeyError(number)

    with pytest.raises(KeyError, match="2"):
        fails()
    assert [record.iteration for record in loop.records] == [1, 2, 3]

    def broken() -> Iterator[int]:
        yield 1
        raise ValueError("source")

    with pytest.raises(ValueError, match="source"):
        list(ipygpumem.track(broken(), silent=True))


def test_no_item_lives_longer_than_the_loop_keeps_it(script_memory: FakeProbe) -> None:
    class Batch:
        pass

    seen: list[weakref.ref[Batch]] = []

    def batches() -> Iterator[Batch]:
        for _ in range(3):
            assert [ref() for ref in seen] == [None] * len(seen)
            batch = Batch()
            seen.append(weakref.ref(batch))
            yield batch
            del batch

    loop = iter(ipygpumem.track(batches(), silent=True))
    for batch in loop:
        del batch
    assert len(seen) == 3


@pytest.mark.usefixtures("others_out_of_sight")
def test_growth_in_every_iteration_is_said_and_who_holds_it(
    script_memory: FakeProbe, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    numpy = pytest.importorskip("numpy")
    history, in_use = [], [0]
    # What the look itself frees is not given back by the loop.
    monkeypatch.setattr(loops, "live_tensors", lambda garbage: add(-30))

    def add(mib: int) -> None:
        in_use.append(in_use[-1] + mib * MIB)
        script_memory.set(in_use[-1])

    for _ in ipygpumem.track(range(7), "epoch"):
        history.append(numpy.zeros(40 * MIB // 8))
        add(40)
    printed = capsys.readouterr().out
    assert re.search(r"^RAM has grown by 40 MiB in each of the last \d iterations$", printed, re.MULTILINE)
    assert "iteration 5 left 40 MiB more on RAM, held by history (history[" in printed
    assert len(history) == 7


@pytest.mark.parametrize("wrong", [5, None, object()])
def test_what_cannot_be_looped_over_is_refused_in_one_line(wrong: Any) -> None:
    with pytest.raises(TraceError, match="an iterable, such as range"):
        ipygpumem.track(wrong)
    with pytest.raises(TraceError, match="must be a string, not int"):
        ipygpumem.track([1], 5)  # type: ignore[arg-type]


def test_in_a_notebook_it_is_one_table_that_is_updated(kernel: Kernel) -> None:
    kernel.run("import ipygpumem, time")
    reply = kernel.run(
        "kept = []\n"
        "for step in ipygpumem.track(range(30), '<b>step'):\n"
        "    kept.append(bytearray(40 << 20)) if step < 6 else None\n"
        "    print('mine') if step == 1 else None"
    )
    assert reply.status == "ok", reply.traceback
    (table,) = reply.reports("track")
    assert table.splitlines()[0].startswith("<b>step 30 of 30 · ")
    assert "10 rows after the first not shown" in table
    html = next(display["data"]["text/html"] for display in reply.displays if "track" in str(display["metadata"]))
    assert "<b>step" not in html
    assert "&lt;b&gt;step" in html
    assert reply.stdout == "mine\n"
    assert kernel.value("[len(ipygpumem.traces()), ipygpumem.traces()[-1].iteration]") == [30, 30]
