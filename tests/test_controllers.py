"""Whether a controller is there is seen by its sockets: busy is not gone, and gone is known at once."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import zmq

from ipygpumem.notebook.cluster import controller
from ipygpumem.notebook.cluster.controller import Controller, greets


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


def place(listener: socket.socket) -> str:
    return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_a_socket_that_nobody_reads_greets_and_serves_others_as_before(*, is_encrypted: bool) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as busy, context.socket(zmq.DEALER) as client:
        if is_encrypted:
            busy.curve_server = True
            client.curve_serverkey, busy.curve_secretkey = zmq.curve_keypair()
            client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
        port = busy.bind_to_random_port("tcp://127.0.0.1")
        assert [greets(f"tcp://127.0.0.1:{port}") for _ in range(100)] == [True] * 100
        client.connect(f"tcp://127.0.0.1:{port}")
        client.send(b"word")
        assert busy.poll(30_000)
        assert busy.recv_multipart()[1:] == [b"word"]


def test_a_port_where_nobody_listens_and_a_tunnel_without_an_end_are_known_at_once(listener: socket.socket) -> None:
    tunnel = threading.Thread(target=lambda: listener.accept()[0].close())
    tunnel.start()
    assert greets(place(listener)) is False
    tunnel.join()
    gone = place(listener)
    listener.close()
    assert greets(gone) is False


def test_of_one_who_says_nothing_nothing_is_known(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "_GREETING_SECONDS", 0.05)
    assert greets(place(listener)) is None
    assert greets("ipc:///tmp/elsewhere") is True


class Clock:
    """A client with one socket, and looks that are over at once, every six seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, heard: Callable[[], bool | None]) -> None:
        self.now = 0.0
        monkeypatch.setattr(controller, "greets", lambda _: heard())
        monkeypatch.setattr(controller, "time", SimpleNamespace(monotonic=lambda: self.now))
        at_once = SimpleNamespace(Thread=lambda target, **_: SimpleNamespace(start=target))
        monkeypatch.setattr(controller, "threading", at_once)
        self.client = SimpleNamespace(_mux_socket=SimpleNamespace(closed=False, LAST_ENDPOINT=b"tcp://a:1\0"))
        self.controller = Controller(self.client)

    def is_silent(self, *, after: float = 6.0) -> bool:
        self.now += after
        return self.controller.is_silent


def test_silence_counts_after_a_minute_and_a_greeting_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[bool | None] = [None] * 11 + [True] + [None] * 12
    clock = Clock(monkeypatch, lambda: heard.pop(0))
    assert [clock.is_silent() for _ in range(24)] == [False] * 23 + [True]


def test_what_was_long_ago_says_nothing_now(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[bool | None] = [False, True, False]
    clock = Clock(monkeypatch, lambda: heard.pop(0))
    assert [clock.is_silent(), clock.is_silent(after=3600), clock.is_silent()] == [True, False, True]


def test_a_client_that_was_closed_beneath_us_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda: True)
    assert not clock.is_silent()
    clock.client._closed = True
    assert clock.is_silent(after=0)
