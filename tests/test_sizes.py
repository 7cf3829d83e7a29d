"""Sizes of objects of any kind, against the process's resident memory."""

import collections
import contextvars
import functools
import itertools
import json
import os
import sys
import textwrap
from importlib.util import find_spec
from types import FrameType
from typing import Any

import pytest

from ipygpumem.heap.allowance import Allowance
from ipygpumem.heap.sizes.sizes import MeasuredSize, Sizes
from tests import hostile
from tests.alone import printed
from tests.process_memory import QUIET, linux

MIB = 1 << 20
TOGETHER = ["", "numpy pandas pyarrow polars polars.datatypes PIL.Image scipy.sparse xarray"]
REST = "zarr h5py sklearn spacy lightgbm xgboost shapely", "jax torch", "numba.typed"
TOGETHER += [pytest.param(names, marks=pytest.mark.thorough) for names in REST]
ROUGH = {
    "polars.datatypes: a Categorical",
    "polars.datatypes: an Enum",
    "lightgbm: a model",
    "xgboost: a model",
    "xgboost: a matrix",
    "shapely: polygons",
    "numba.typed: a list",
}
"""Kinds whose size is estimated, or whose making leaves gaps between objects."""


def wrong(*arguments: object, least: int = 5 * MIB) -> dict[str, tuple[int, int]]:
    """Return the kinds, or mixtures of kinds, of which not as much is named as the process has
    grown.
    """
    sizes = json.loads(
        printed("-m", "tests.kinds", *arguments, env=os.environ | QUIET).splitlines()[-1]
    )
    assert min(grown for name, (grown, _) in sizes.items() if name not in ROUGH) > least, sizes
    within = {name: 0.5 if name in ROUGH else 0.05 for name in sizes}
    return {
        name: (grown, named)
        for name, (grown, named) in sizes.items()
        if abs(named / grown - 1) > within[name]
    }


LONG_ARRAYS = {
    "two rows, column by column": """
        array = numpy.empty((2, number // 2), object, order="F")
        array[:] = [texts[: number // 2], texts[number // 2 :]]
    """,
    "a field of a structured array": """
        array = numpy.empty(number, dtype=[("number", int), ("text", object)])
        array["text"] = texts
    """,
    "a subclass": """
        class Column(numpy.ndarray): pass
        array = numpy.empty(number, object).view(Column).copy()
        array[:] = texts
    """,
    "a column with more than a million rows": """
        number = 1_100_000
        array = numpy.array([f"text {index}" for index in range(number)], object)
    """,
}


@pytest.mark.parametrize("kind", LONG_ARRAYS)
def test_a_long_array_of_objects_has_the_size_of_its_objects(kind: str) -> None:
    numpy = pytest.importorskip("numpy")
    number = 150_000
    space = {"numpy": numpy, "number": number}
    space["texts"] = [f"text {index}" for index in range(number)]
    exec(textwrap.dedent(LONG_ARRAYS[kind]), space)
    array = space["array"]
    del space
    sizes = Sizes()
    size = sizes.measure(array)
    texts = array["text"] if array.dtype.names else array
    with_objects = array.nbytes + sum(map(sys.getsizeof, texts.ravel().tolist()))
    assert size.device_bytes["cpu"] == pytest.approx(with_objects, rel=0.15)
    assert sizes.complete


@linux
@pytest.mark.parametrize("libraries", TOGETHER)
def test_sizes_match_the_memory_of_the_process(libraries: str) -> None:
    assert (
        wrong("each", *[name for name in libraries.split() if find_spec(name.partition(".")[0])])
        == {}
    )


@linux
@pytest.mark.parametrize(
    ("first", "stop"),
    [
        (0, 2),
        *(pytest.param(first, first + 5, marks=pytest.mark.thorough) for first in range(0, 200, 5)),
    ],
)
def test_random_mixtures_of_kinds_are_named(first: int, stop: int) -> None:
    assert wrong("mixed", *range(first, stop), least=64 * MIB) == {}


class User:
    def __init__(self, content: object) -> None:
        self.content = content


def test_memory_that_several_objects_share_is_counted_once() -> None:
    text = "x" * (1 << 20)
    sizes = Sizes()
    both = [text, [text], {"again": text}, User(text)]
    # The text of 1 MiB once; the containers take less than 2,000 bytes.
    assert 1 << 20 < sizes.measure(both).size_bytes < (1 << 20) + 2000
    assert sizes.measure({"again": text}).size_bytes < 2000
    assert sizes.measure(both).size_bytes == 0


@pytest.mark.parametrize("count", [1, 100], ids=["few variables", "many variables"])
def test_a_tasks_context_has_only_the_values_of_its_own(count: int) -> None:
    """A variable that a task sets gives its context nodes of its own, with all other values."""
    variables = [contextvars.ContextVar[bytes](f"current {number}") for number in range(count)]
    own = contextvars.ContextVar[bytes]("own")

    def measure() -> int:
        for variable in variables:
            variable.set(bytes(1 << 20))
        of_task = contextvars.copy_context()
        of_task.run(own.set, bytes(5 << 20))
        assert of_task[variables[0]] is variables[0].get()
        return Sizes().measure(of_task).size_bytes

    # The task's own value of 5 MiB and the nodes of its context; no other value.
    assert 5 << 20 <= contextvars.Context().run(measure) < (5 << 20) + 20_000


def test_memory_in_the_only_dict_of_an_object_is_counted_once() -> None:
    holders = [
        User({"weights": bytearray(1 << 20)}),
        functools.partial(print, weights=bytearray(1 << 20)),
        collections.UserDict(weights=bytearray(1 << 20)),
    ]
    for holder in holders:
        sizes = Sizes()
        # The array of 1 MiB once; the object and its dict take less than 2,000 bytes.
        assert 1 << 20 < sizes.measure(holder).size_bytes < (1 << 20) + 2000, type(holder)
        sizes.drop()


def test_a_part_that_leads_back_has_no_other_part() -> None:
    class Connector:
        def __init__(self, trainer: object) -> None:
            self.trainer = trainer

    class Trainer:
        def __init__(self) -> None:
            self.connector, self.results = Connector(self), [bytes(1 << 20)]

    size = Sizes().measure(Trainer())
    assert [share.name for share in size.parts] == [".results", ".connector"]
    assert size.parts[1].size_bytes < 10_000  # with its class, which a function has made
    # The results of 1 MiB; the rest are the objects and their classes.
    assert 1 << 20 < size.size_bytes < (1 << 20) + 20_000


def test_an_array_and_a_tensor_on_its_memory_are_counted_once() -> None:
    numpy = pytest.importorskip("numpy")
    arrow = pytest.importorskip("pyarrow")
    array = numpy.ones(1 << 17)
    both = [
        array,
        array[10:],
        memoryview(array),
        arrow.array(array),
        arrow.array(array).slice(10).to_numpy(),
    ]
    # The memory of 1 MiB once; its arrays take less than 5,000 bytes.
    assert 1 << 20 < Sizes().measure(both).size_bytes < (1 << 20) + 5000
    assert 1 << 20 < Sizes().measure(both[::-1]).size_bytes < (1 << 20) + 5000


_TEXTS_OF_A_FRAME = 1 << 15


def frame_and_table() -> tuple[Any, Any]:
    """Return a frame of polars and the table of arrow from which it was made, with whose numbers it
    shares the memory.
    """
    polars, arrow = pytest.importorskip("polars"), pytest.importorskip("pyarrow")
    texts = [f"{number:0100d}" for number in range(_TEXTS_OF_A_FRAME)]
    table = arrow.table({"a": range(_TEXTS_OF_A_FRAME), "text": texts})
    schema = arrow.schema([("a", "int64"), ("text", arrow.string_view())])
    return polars.from_arrow(table.cast(schema)), table


def test_columns_that_polars_objects_share_are_counted_once() -> None:
    polars = pytest.importorskip("polars")
    frame, _ = frame_and_table()
    size = Sizes().measure(frame).size_bytes
    assert size == pytest.approx((8 + 16 + 100) * _TEXTS_OF_A_FRAME, rel=0.01)
    parts = [
        frame.with_columns(b="a"),
        frame["text"],
        frame.head(9),
        frame.filter(polars.col("a") % 3000 == 0),
    ]
    assert Sizes().measure([frame, *parts]).size_bytes < 1.01 * size
    assert Sizes().measure([frame.head(9), frame]).size_bytes == pytest.approx(size, rel=0.01)


def test_columns_that_polars_and_arrow_share_are_counted_once() -> None:
    frame, table = frame_and_table()
    size = Sizes().measure(frame).size_bytes
    # Views of texts are polars' own.
    assert Sizes().measure([frame, table]).size_bytes < 1.01 * size + 108 * _TEXTS_OF_A_FRAME


def test_a_column_of_polars_is_also_in_its_frame() -> None:
    frame, _ = frame_and_table()
    column = frame["text"]
    size = Sizes().measure(frame).size_bytes
    named = Sizes({"frame": frame, "part": column})
    assert named.measure(frame, "frame").size_bytes == pytest.approx(size, rel=0.001)
    assert named.measure(column, "part").also_in == ("frame",)


def test_objects_in_a_frame_of_polars_are_counted() -> None:
    polars = pytest.importorskip("polars")
    without_buffers = polars.DataFrame({"things": [object()] * 1000})
    # A thousand references of 8 bytes.
    assert Sizes().measure(without_buffers).size_bytes > 8000


def test_an_unnamed_object_names_objects_that_share_its_memory() -> None:
    texts = [f"text {number}" for number in range(10_000)]
    names = {"small": [texts[0]], "first": texts[:], "second": texts[:]}
    sizes = Sizes(names)
    small, first, again = (sizes.measure(value, name) for name, value in names.items())
    assert small.also_in == first.also_in == ()
    assert again.also_in == ("first",)
    # A list of 10,000 references, without the texts.
    assert again.size_bytes < 90_000


def test_a_named_object_is_counted_under_its_own_name() -> None:
    data = ["x" * (1 << 20)]
    names = {"wrapper": User(data), "data": data}
    sizes = Sizes(names)
    wrapper, own = (sizes.measure(value, name) for name, value in names.items())
    assert wrapper.also_in == ("data",)
    # The wrapper has only its own bytes, the data its text of 1 MiB.
    assert wrapper.size_bytes < 1000 < 1 << 20 < own.size_bytes
    assert sizes.measure(data, "data").size_bytes == 0


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ([b"x" * 100_000, [], "text"], {"bytes": 1, "list": 1, "str": 1}),
        (["text"] * 70, {"str": 70}),
        ({"a": "x" * 9000, 1: [1]}, {'["a"]': 1, "[1]": 1}),
        (dict.fromkeys(range(1000), 1.5), {"float": 1000}),
        (User([1, 2]), {".content": 1}),
    ],
    ids=["items of several types", "texts", "a dict", "numbers", "an object"],
)
def test_parts_are_named_as_the_user_knows_them(value: object, parts: dict[str, int]) -> None:
    size = Sizes().measure(value)
    assert {part.name: part.items for part in size.parts} == parts
    assert 0 < sum(part.size_bytes for part in size.parts) <= size.size_bytes


def test_columns_of_polars_are_parts_with_their_memory() -> None:
    polars = pytest.importorskip("polars")
    number = 1 << 16
    frame = polars.DataFrame(
        {"a": range(number), "text": [f"{index:0100d}" for index in range(number)]}
    )
    size = Sizes().measure(frame)
    parts = {part.name: part.size_bytes for part in size.parts}
    # Integers of 8 bytes, texts of 100.
    assert parts["a"] == 8 * number
    assert parts["text"] > 100 * number
    assert size.size_bytes == pytest.approx(sum(parts.values()), rel=0.01)
    named = {"part": frame["a"], "frame": frame}
    sizes = Sizes(named)
    assert sizes.measure(named["part"], "part").size_bytes >= 8 * number
    rest = sizes.measure(frame, "frame")
    assert rest.also_in == ("part",)
    assert rest.size_bytes == pytest.approx(size.size_bytes - 8 * number, rel=0.01)


def test_parts_of_a_frame_are_its_columns() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"text": ["x" * 1000] * 9 + ["y" * 10_000], "a": 1.0, "b": 2.0}
    ).astype({"text": object})
    frame["other"] = pandas.Series([["z" * 20_000]] * 10, dtype=object)
    # consolidates them
    parts = {part.name: part.size_bytes for part in Sizes().measure(frame.copy()).parts}
    assert list(parts)[:2] == ["other", "text"]
    # Ten numbers of 8 bytes.
    assert parts["a"] == parts["b"] >= 80


def test_hostile_objects_run_no_code_and_neighbours_are_measured() -> None:
    text = b"x" * (1 << 20)
    kinds = (
        hostile.Hostile,
        hostile.Container,
        hostile.Sequence,
        hostile.Slotted,
        hostile.Lazy,
        hostile.Oom,
    )
    objects = [hostile.made(kind, [text] if kind is hostile.Sequence else None) for kind in kinds]
    with hostile.untouched():
        for value in ([*objects, text], *objects):
            alone = Sizes({"data": value}).measure(value, "data")
        together = Sizes().measure([*objects, text])
    # A hostile object has only its own bytes; all of them together have the text of 1 MiB.
    assert alone.size_bytes < 3000
    assert 1 << 20 < together.size_bytes < (1 << 20) + 5000


def test_a_users_subclasses_are_read_without_running_their_code() -> None:
    numpy, pandas = pytest.importorskip("numpy"), pytest.importorskip("pandas")
    arrow, polars = pytest.importorskip("pyarrow"), pytest.importorskip("polars")

    # A frame whose block and index are hostile objects; one of polars.
    labels = object.__new__(hostile.Meta("Labels", (pandas.Index,), hostile.body))
    frame = object.__new__(hostile.Meta("Frame", (pandas.DataFrame,), hostile.body))
    other = object.__new__(hostile.Meta("Other", (polars.DataFrame,), hostile.body))
    plain = pandas.DataFrame({"number": numpy.ones(1 << 17), "thing": numpy.empty(1 << 17, object)})
    plain._mgr.blocks[1].values.fill(hostile.made(hostile.Hostile))
    plain._mgr.axes[0] = labels
    object.__setattr__(frame, "_mgr", plain._mgr)
    object.__setattr__(other, "_df", polars.DataFrame({"number": numpy.ones(1 << 17)})._df)

    class Words(arrow.ExtensionArray):  # type: ignore[misc]  # pyarrow is untyped
        buffers = hostile.trap("buffers")

    class WordType(arrow.ExtensionType):  # type: ignore[misc]  # as above
        def __arrow_ext_serialize__(self) -> bytes:
            return b""

        def __arrow_ext_class__(self) -> type:
            return Words

    # An array of pyarrow whose type is the user's.
    words = arrow.ExtensionArray.from_storage(
        WordType(arrow.int64(), "words"), arrow.array(numpy.ones(1 << 17, "i8"))
    )
    assert type(words) is Words
    with hostile.untouched():
        sizes = [Sizes().measure(value).size_bytes for value in (frame, other, words)]
    assert [round(size / (1 << 20), 1) for size in sizes] == [2, 1, 1]


def test_empty_objects_of_libraries_are_measured() -> None:
    numpy, pandas, polars, arrow = map(
        pytest.importorskip, ("numpy", "pandas", "polars", "pyarrow")
    )
    empty = [
        numpy.array([], object),
        numpy.array([]),
        pandas.DataFrame(columns=["a"]),
        pandas.Series([], dtype=object),
    ]
    empty += [
        pandas.Series([], dtype="category"),
        polars.DataFrame(),
        polars.Series("a", [], polars.String),
    ]
    empty += [
        polars.Series("a", [], polars.Categorical),
        arrow.table({}),
        arrow.array([]),
        arrow.array([], arrow.string()),
    ]
    empty += [
        pytest.importorskip("scipy.sparse").csr_matrix((0, 0)),
        pytest.importorskip("xarray").Dataset(),
    ]
    sizes = [Sizes().measure(value) for value in empty]
    assert all(size.complete for size in sizes)
    # Empty objects of libraries: their metadata.
    assert max(size.size_bytes for size in sizes) < 20_000


def test_a_limit_is_reported_and_a_long_list_is_sampled() -> None:
    assert not Sizes(limit=2000).measure([[str(number)] for number in range(3000)]).complete
    chain: list[object] = []
    for _ in range(100_000):
        chain = [chain]
    linked = Sizes().measure(chain)
    assert linked.complete
    assert linked.size_bytes == pytest.approx(100_000 * 80, rel=0.01)
    long = Sizes(allowance=Allowance(100)).measure(
        [str(number) for number in range(10**6, 3 * 10**6)]
    )
    assert long.complete
    assert long.notes == ("estimated from a sample of its items",)
    assert long.size_bytes == pytest.approx(2 * 10**6 * (64 + 8), rel=0.01)


def test_a_spent_allowance_keeps_the_sizes_read_before() -> None:
    rows = [[[[str(number)]]] for number in range(3000)]
    again = list(rows)  # each row is shared, so that all are read together
    sizes = list[int]()
    for checks in range(12):
        clock = itertools.count().__next__  # each check takes a second
        allowance = Allowance(checks + 2, clock=clock, available=lambda: 1 << 40)
        sizes.append(Sizes(allowance=allowance).measure(rows).size_bytes)
    assert sizes == sorted(sizes)
    steps = len(set(sizes))
    assert steps >= 5  # the list, then each level of the rows
    assert sizes[-1] == Sizes().measure(rows).size_bytes
    del again


CODE_OF_MANY_OBJECTS = (
    "[str(n) for n in range(10**5)]",
    "[{'number': n, 'text': str(n)} for n in range(50_000)]",
)


@pytest.mark.parametrize("code", [*CODE_OF_MANY_OBJECTS, "dict.fromkeys(range(10**5), 1.5)"])
def test_no_function_is_called_for_each_object(code: str) -> None:
    size, calls = calls_for(eval(code))
    assert size.size_bytes > 3_000_000
    assert calls - calls_for([])[1] < 100_000 / 25  # some for each chunk of thousands


def test_few_functions_are_called_for_objects_of_a_column() -> None:
    polars = pytest.importorskip("polars")
    few, many = (
        polars.Series([[row] for row in range(rows)], dtype=polars.Object) for rows in (1, 10_000)
    )
    calls_for(few)  # the first call imports more
    # A generator that yields the objects counts as called for each, twice.
    assert calls_for(many)[1] - calls_for(few)[1] < 2.1 * 10_000


def calls_for(value: object) -> tuple[MeasuredSize, int]:
    """Return an object's size, and how many Python functions were called."""
    calls = 0
    sizes = Sizes()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(profile)
    try:
        return sizes.measure(value), calls
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize(
    "kind", ["a view", "a view of a view", "a view of bytes", "a masked array"]
)
def test_the_data_of_a_view_is_left_out_with_its_owner(kind: str) -> None:
    """The owner has one reference, that of the view."""
    np = pytest.importorskip("numpy")
    view = {
        "a view": lambda: np.ones(1 << 20)[:],
        "a view of a view": lambda: np.ones(1 << 20)[1:][1:].reshape(2, -1),
        "a view of bytes": lambda: np.frombuffer(bytes(8 << 20)),
        "a masked array": lambda: np.ma.masked_invalid(np.ones(1 << 20)),
    }[kind]()
    holder = [view]
    sizes = Sizes()
    sizes.exclude_data([view])
    del view
    assert sizes.measure(holder).size_bytes < 2 << 20  # the mask has a byte for each element


def test_an_array_left_out_takes_its_texts_with_it() -> None:
    np = pytest.importorskip("numpy", minversion="2")
    texts = np.array([f"{number:040d}" for number in range(50_000)], np.dtypes.StringDType())
    sizes = Sizes()
    sizes.exclude_data([texts])
    assert sizes.measure([texts]).size_bytes < MIB
