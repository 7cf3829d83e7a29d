"""Fixtures of the callbacks' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ipygpumem.api import shell as where
from ipygpumem.measuring.meter import Meter
from ipygpumem.measuring.traces import Traces
from tests.fakes import FakeProbe
from tests.integrations.steps import Card


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    """A card whose memory the test sets; it and the host are all that a script's traces measure."""
    host, card = FakeProbe(), Card("cuda:0")
    host.set(100 << 20)
    traces = Traces(Meter([host, card]))
    monkeypatch.setattr(where.traces, "of_script", lambda: traces)
    yield card
    traces.meter.close()


@pytest.fixture
def broken_meter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of ours can be measured."""

    def fail(self: Meter, lasts: object = None) -> None:
        raise RuntimeError("no counters here")

    monkeypatch.setattr(Meter, "start", fail)
    return
