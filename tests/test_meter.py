"""The meter, with exact figures from scripted probes, and the one thread in which it samples."""

import os
import signal
import threading
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipygpumem.meter import own_growth
from ipygpumem.meter.meter import Meter, Span
from ipygpumem.meter.worker import Worker
from ipygpumem.records import Reading, Usage
from ipygpumem.units import MIB
from tests.fakes import FakeProbe
from tests.waiting import wait_for


def test_a_device_that_is_first_used_inside_the_span_began_empty() -> None:
    class Late(FakeProbe):
        ready = False

        def read(self, *, detail: bool = False, peak: bool = True) -> tuple[Reading, ...]:
            return super().read() if self.ready else ()

    probe = Late("cuda:0")
    meter = Meter([probe])
    span = meter.span()
    probe.ready = True
    probe.spike(80)
    probe.set(60)
    (usage,) = span.stop()
    assert usage.before_bytes == 0
    assert usage.after_bytes == 60
    assert usage.peak_bytes == 80


def test_sampling_finds_lasting_peaks_until_the_last_span_ends() -> None:
    probe = FakeProbe(sampled=True)
    meter = Meter([probe], sample_seconds=0.001)
    outer = meter.span()
    inner = meter.span()
    probe.set(300)
    wait_for(lambda: outer.peaks["cpu"] >= 300)
    probe.set(10)
    usage = inner.stop()[0]
    assert (usage.peak_bytes, usage.method) == (300, "sampled")
    samplers = [thread for thread in threading.enumerate() if thread.name == "ipygpumem-sampler"]
    assert len(samplers) == 1
    outer.stop()
    samplers[0].join(10)
    assert not samplers[0].is_alive()


def test_a_changed_probe_keeps_its_peak_and_starts_sampling() -> None:
    probe = FakeProbe()
    meter = Meter([probe], sample_seconds=0.001)
    span = meter.span()
    probe.spike(500)

    def sample() -> None:
        probe.rearm()
        probe.sampled = True

    meter.change(sample)
    (sampler,) = [thread for thread in threading.enumerate() if thread.name == "ipygpumem-sampler"]
    assert span.stop()[0].peak_bytes == 500
    sampler.join(10)


def test_probes_that_turn_up_later_are_measured_from_then_on() -> None:
    late = FakeProbe("cuda:0")
    finds: list[list[FakeProbe]] = [[], [late], []]
    meter = Meter([FakeProbe()], find_more=lambda: finds.pop(0))
    span = meter.span()
    late.set(70)
    figures = [(one.device, one.before_bytes, one.peak_bytes) for one in span.stop()]
    assert figures == [("cpu", 0, 0), ("cuda:0", 0, 70)]
    meter.now()
    assert finds == []
    meter.close()
    assert late.closed


ENDS = st.tuples(st.sampled_from(["stop", "read"]), st.integers(0, 5))
CHANGES = st.tuples(st.sampled_from(["set", "spike"]), st.integers(0, 1000))
ACTIONS = st.lists(st.one_of(st.just(("start", 0)), ENDS, CHANGES), max_size=60)


@given(ACTIONS)
def test_any_overlap_of_spans_gives_the_peak_of_the_true_history(
    actions: list[tuple[str, int]],
) -> None:
    probe = FakeProbe()
    meter = Meter([probe])
    history = [0]
    opened: list[tuple[Span, int]] = []
    for action, number in actions:
        if action == "start":
            history.append(probe._current)
            opened.append((meter.span(), len(history) - 1))
        elif action in ("stop", "read") and opened:
            meter.now()  # which no span notices
            span, began = (
                opened.pop(number % len(opened))
                if action == "stop"
                # A reading is in no span.
                else opened[number % len(opened)]
            )
            (usage,) = span.stop() if action == "stop" else span.read()
            assert usage.peak_bytes == max(history[began:])
            assert usage.before_bytes == history[began]
            assert usage.after_bytes == probe._current
        elif action == "set":
            probe.set(number)
            history.append(number)
        elif action == "spike":
            probe.spike(number)
            history += [number, probe._current]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "ipygpumem" in thread.name]


def test_jobs_run_on_time_in_one_thread_that_ends_with_the_last() -> None:
    worker = Worker()
    often = [0]
    seldom = [0]

    def every_millisecond() -> float:
        often[0] += 1
        return 0.001

    def every_hour() -> float:
        seldom[0] += 1
        return 3600.0

    assert threads() == []
    worker.add(every_millisecond)
    worker.add(every_hour)

    # One thread for both jobs.
    wait_for(lambda: often[0] > 20)
    assert len(threads()) == 1
    assert seldom == [1]

    # It ends with the last of them.
    worker.remove(every_millisecond)
    worker.remove(every_hour)
    wait_for(lambda: not threads())


def test_a_thread_that_failed_to_start_starts_with_the_next_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker()
    ran = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(
            threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread"))
        )
        with pytest.raises(RuntimeError, match="new thread"):
            worker.add(ran.set)
    worker.add(ran.set)
    assert ran.wait(10)
    worker.close()


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="no signal masks on this system")
def test_signals_are_left_to_the_main_thread() -> None:
    worker = Worker()
    blocked = threading.Event()

    def job() -> None:
        if {signal.SIGINT, signal.SIGTERM, signal.SIGALRM} <= signal.pthread_sigmask(
            signal.SIG_BLOCK, ()
        ):
            blocked.set()

    worker.add(job)
    assert blocked.wait(10)
    worker.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_childs_clock_works_even_if_the_lock_was_held() -> None:
    worker = Worker()
    started = threading.Event()

    def job() -> float:
        started.set()
        return 0.001

    worker.add(job)
    assert started.wait(10)

    # The child is forked while the lock is held.
    with worker._changed:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(20)
                again = threading.Event()
                worker.wake(job)
                worker.remove(job)
                worker.add(lambda: again.set())
                if again.wait(10) and not worker._next_times.keys() & {job}:
                    worker.close()
                    code = 0
            finally:
                os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    worker.close()


def test_a_probe_that_failed_at_the_start_gives_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its devices' growth since then is unknown; a device that the code first uses then was empty
    before.
    """
    probe = FakeProbe("cuda:0")
    more = list[FakeProbe]()
    probe.set(500)

    def find_more() -> list[FakeProbe]:
        return [more.pop()] if more else []

    meter = Meter([probe], find_more=find_more)

    # A span whose start failed.
    with monkeypatch.context() as patch:
        patch.setattr(probe, "rearm", lambda: 1 / 0)
        failed = meter.span()
    assert failed.read() == ()

    # A span after it, in which a second device is found.
    measured = meter.span()
    more.append(FakeProbe("cuda:1"))
    more[0].set(7)
    assert [usage.delta_bytes for usage in measured.stop()] == [0, 7]
    meter.close()


def test_our_part_of_a_cell_s_growth_is_never_more_than_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_growth, "unreported_bytes", {"%%peak": 20 * MIB, "modules": 15 * MIB})
    kept = Usage("cpu", 0, 24 * MIB, 24 * MIB, None, "rss")
    assert own_growth.take_growth_text([kept]) == "of it 20 MiB for %%peak, 4 MiB for modules"
    assert own_growth.take_growth_text([kept]) == ""
