"""Memory that C objects keep is read from their structs: exactly, without code of the user, and
without waiting.
"""

import io
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from ipygpumem.heap.kinds import structs
from ipygpumem.heap.kinds.libraries import (
    UNREAD,
    LibraryMemory,
    pieces_behind,
    read_behind,
    reader_for,
)
from ipygpumem.heap.sizes.region import Region
from ipygpumem.heap.sizes.sizes import Sizes

NUMBER_OF_ROWS = 20_000


def fill(connection: sqlite3.Connection) -> None:
    connection.execute("create table t (text text)")
    connection.executemany(
        "insert into t values (?)", (("x" * 1000,) for _ in range(NUMBER_OF_ROWS))
    )


def size_of(item: object) -> int:
    return sum(piece.size_bytes for piece in pieces_behind(item))


def content_of(item: object) -> LibraryMemory:
    read = reader_for(type(item))
    assert read is not None
    return read_behind(item, read)


@pytest.fixture
def database() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:", check_same_thread=False)) as connection:
        yield connection


def test_this_pythons_structs_can_be_read() -> None:
    assert structs.can_read_text_streams()
    assert structs.can_read_databases()


def test_reading_a_database_leaves_its_transaction_open(database: sqlite3.Connection) -> None:
    fill(database)
    assert size_of(database) > NUMBER_OF_ROWS * 1000
    assert database.in_transaction
    database.rollback()
    assert database.execute("select count(*) from t").fetchone() == (0,)


def test_reading_a_database_calls_no_callback(database: sqlite3.Connection) -> None:
    fill(database)
    called = list[object]()
    database.set_trace_callback(called.append)
    database.set_progress_handler(lambda: called.append("progress"), 1)

    def authorize(*arguments: object) -> int:
        called.append(arguments)
        return sqlite3.SQLITE_OK

    database.set_authorizer(authorize)
    assert size_of(database) > NUMBER_OF_ROWS * 1000
    assert called == []


def test_a_subclass_of_a_connection_is_read() -> None:
    class Logged(sqlite3.Connection):
        def execute(self, *arguments: Any) -> Any:
            raise AssertionError

    with closing(Logged(":memory:")) as connection:
        connection.executescript("create table t (a); insert into t select zeroblob(3000000)")
        assert size_of(connection) > 3_000_000


def test_connections_that_share_a_cache_have_one_piece() -> None:
    place = "file:shared?mode=memory&cache=shared"
    with (
        closing(sqlite3.connect(place, uri=True)) as first,
        closing(sqlite3.connect(place, uri=True)) as second,
    ):
        fill(first)
        first.commit()
        pieces = [*pieces_behind(first), *pieces_behind(second)]
    by_key = {piece.key: piece.size_bytes for piece in pieces}
    assert len(by_key) == len(pieces) - 1
    assert NUMBER_OF_ROWS * 1000 < sum(by_key.values()) < NUMBER_OF_ROWS * 1200


def test_a_closed_database_or_stream_has_no_memory() -> None:
    database = sqlite3.connect(":memory:")
    stream = io.StringIO("text")
    fill(database)
    database.close()
    stream.close()
    assert pieces_behind(database) == pieces_behind(stream) == []


def test_a_database_in_use_by_a_thread_is_not_waited_for(database: sqlite3.Connection) -> None:
    started = threading.Event()
    go_on = threading.Event()

    def wait(value: object) -> object:
        started.set()
        go_on.wait()
        return value

    # A query that lasts until it is told to go on.
    database.create_function("wait", 1, wait)
    thread = threading.Thread(target=lambda: database.execute("select wait(1)").fetchall())
    thread.start()
    try:
        started.wait()
        content = content_of(database)
    finally:
        go_on.set()
        thread.join()
    assert content == ([], [], False)
    assert size_of(database) > 0


def test_a_stream_is_read_without_changing_its_state() -> None:
    stream = io.StringIO()
    stream.write("x" * 10_000)
    before = size_of(stream)
    stream.write("☃" * 10_000)
    after = size_of(stream)
    # One byte for each of 10,000 characters, then more for wide ones.
    assert 10_000 < before < 14_000 < after
    assert stream.getvalue() == "x" * 10_000 + "☃" * 10_000


def test_a_struct_of_another_version_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structs, "can_read_text_streams", lambda: False)
    size = Sizes().measure(io.StringIO("x" * 10_000))
    assert size.size_bytes < 1000
    assert size.notes == (UNREAD,)


def test_arrays_of_texts_share_the_texts_of_their_dtype() -> None:
    numpy = pytest.importorskip("numpy", minversion="2.0")
    array = numpy.array(["x" * 10_000, "y" * 20_000], dtype=numpy.dtypes.StringDType())
    region = Region([array, array[:1]])
    size = region.bytes_of(region.reach(region.objects))["cpu"]
    assert 30_000 < size < 45_000


def test_a_row_leads_to_its_array_or_its_own_objects() -> None:
    numpy = pytest.importorskip("numpy")
    data = [b"x" * 100_000, b"y" * 100_000]
    array = numpy.array([(data[0],), (data[1],)], [("data", object)])
    shown = array[0]
    copied = array[0].copy()
    for row, expected in ((shown, data), (copied, data[:1])):
        reached = Region([row]).objects
        assert {id(item) for item in data if id(item) in reached} == set(map(id, expected))
