"""Errors that hold arrays in their arguments, attributes or stored frames are named with the line
that frees them.
"""

import gc
import re
import sys

import pytest

from benchmarks.harness.kernel import Kernel
from ipygpumem.heap.allowance import Allowance
from ipygpumem.reclaim import kept_errors, stored_errors
from ipygpumem.reclaim.error_references import ErrorReference, line_that_removes, reference_to
from ipygpumem.records import KeptError, RecoveryRecord
from tests.steps import recovery_report, run_cells

SETUP = """
class TooLarge(MemoryError):
    pass
class WithSlots(MemoryError):
    __slots__ = ("batch",)
class Linked(ValueError):
    pass
def fail(size=4):
    local = big(size)
    raise MemoryError("out of memory")
"""
LINE_OF_REPORT = re.compile(
    r"^ *(the (?:last )?error.* still holds .*)\. To free it: (.*)$", re.MULTILINE
)

FAILING_CODE = {
    "an argument": """
raise TooLarge("out of memory", big())
""",
    "an argument in containers": """
raise TooLarge("out of memory", [{"x": (big(), big())}])
""",
    "an attribute": """
error = TooLarge("out of memory")
error.batch = big()
raise error
""",
    "a slot": """
error = WithSlots("out of memory")
error.batch = big()
raise error
""",
    "an attribute, in a function": """
def train():
    error = TooLarge("out of memory")
    error.batch = {"x": big()}
    raise error
train()
""",
    "a cause": """
try:
    raise Linked(big())
except Linked as cause:
    raise MemoryError from cause
""",
    "a context": """
try:
    raise TooLarge(big())
except MemoryError:
    raise ValueError("wrapped")
""",
    "the wrapper of an error": """
try:
    fail()
except MemoryError as error:
    raise Linked("wrapped", big()) from error
""",
    "a variable too": """
caught = None
def train():
    global caught
    caught = TooLarge("out of memory", big())
    raise caught
train()
""",
    "a list too": """
errors = [1, 2]
try:
    raise TooLarge("out of memory", big())
except MemoryError as error:
    errors.append(error)
    raise
""",
    "a stored context": """
errors = {}
try:
    raise TooLarge("out of memory", big())
except MemoryError as error:
    errors["first"] = error
    raise ValueError("wrapped")
""",
    "other memory than arrays": """
raise TooLarge("out of memory", [str(number) for number in range(100_000)], big())
""",
}
if sys.version_info >= (3, 11):
    FAILING_CODE["a member of a group"] = """
raise ExceptionGroup("both", [KeyError(), TooLarge(big())])
"""
    FAILING_CODE["a note of an error"] = """
error = TooLarge("out of memory", big())
error.add_note("a note")
raise error
"""

STORED = {
    "a variable": """
try:
    fail()
except MemoryError as error:
    kept = error
""",
    "a variable and a list": """
errors = [0]
try:
    fail()
except MemoryError as error:
    kept = error
    errors.append(error)
""",
    "a list of errors": """
errors = []
for _ in range(5):
    try:
        fail()
    except MemoryError as error:
        errors.append(error)
""",
    "a list with other items": """
errors = ["text"]
for _ in range(3):
    try:
        fail()
    except MemoryError as error:
        errors.append(error)
""",
    "a dict": """
errors = {"it's \\"a\\" key": None, "ok": 1}
try:
    fail()
except MemoryError as error:
    errors["it's \\"a\\" key"] = error
""",
    "a dict with keys of its own": """
class Key:
    __hash__ = object.__hash__
    def __repr__(self): raise SystemError
errors = {"ok": 1}
try:
    fail()
except MemoryError as error:
    errors[Key()] = error
""",
    "pairs in a list": """
errors = []
for step in range(3):
    try:
        fail()
    except MemoryError as error:
        errors.append((step, error))
errors.append("text")
""",
    "a tuple": """
try:
    fail()
except MemoryError as error:
    kept = (1, error)
""",
    "a set": """
try:
    fail()
except MemoryError as error:
    kept = {error, 1}
""",
    "arguments": """
kept = ValueError(big())
""",
    "attributes of another error": """
kept = KeyError("no memory")
kept.batch = [big()]
""",
    "a chain of stored errors": """
errors = []
try:
    try:
        fail()
    except MemoryError as error:
        errors.append(error)
        raise ValueError
except ValueError as error:
    kept = error
""",
    "an output": """
ValueError(big())
""",
    "an output and a variable": """
kept = ValueError(big())
kept
""",
}

LOSES = {
    "text in pairs with errors": (
        """
kept = []
for step in range(3):
    try:
        fail()
    except MemoryError as error:
        kept.append((f"step {step}", error))
""",
        "kept",
    ),
    "a tuple": (
        """
try:
    fail()
except MemoryError as error:
    kept = (value(), error)
""",
        "kept",
    ),
    "tuples in a list": (
        """
kept = []
for _ in range(2):
    try:
        fail()
    except MemoryError as error:
        kept.append((value(), error))
""",
        "kept[0]",
    ),
    "a set": (
        """
try:
    fail()
except MemoryError as error:
    kept = {error, frozenset([value])}
""",
        "kept",
    ),
    "keys without source text": (
        """
class Key:
    pass
kept = {Key(): value(), -3: ValueError(big())}
try:
    fail()
except MemoryError as error:
    kept[Key()] = error
""",
        "kept",
    ),
    "an output": (
        """
(value(), ValueError(big()))
""",
        "Out[",
    ),
}
"""Stored errors whose line removes other objects too, and the container of these."""

EXACT = {
    "a list that is an output too": """
kept = [value()]
try:
    fail()
except MemoryError as error:
    kept.append(error)
kept
""",
    "a list with two names": """
kept = other = [value()]
try:
    fail()
except MemoryError as error:
    kept.append(error)
""",
    "dicts in a list": """
kept = []
for _ in range(3):
    try:
        fail()
    except MemoryError as error:
        kept.append({"model": value(), "error": error})
""",
    "one dict in a list": """
kept = []
try:
    fail()
except MemoryError as error:
    kept.append({"model": value(), "error": error})
""",
    "lists in a dict": """
kept = {}
for name in "ab":
    try:
        fail()
    except MemoryError as error:
        kept[name] = [value(), error]
""",
    "keys that are numbers or text": """
kept = {0.5: value()}
for key in (True, 1.25, None, -3, "a"):
    kept[key] = ValueError(big())
""",
    "keys that are tuples": """
kept = {(): value()}
for key in ((1,), (1e-3, "adam", (2, None))):
    kept[key] = ValueError(big())
""",
    "a defaultdict": """
import collections
kept = collections.defaultdict(list)
try:
    fail()
except MemoryError as error:
    kept["a"] += [value(), error]
""",
    "an ordered dict": """
import collections
kept = collections.OrderedDict(model=value())
try:
    fail()
except MemoryError as error:
    kept["error"] = error
""",
    "an output of a list": """
[value(), ValueError(big())]
""",
}
"""Stored errors next to objects that the line leaves alone."""

CYCLES = {
    "an attribute of its own": """
kept = ValueError(big())
kept.first = kept
""",
    "a local of the function that caught it": """
def attempt():
    try:
        fail()
    except MemoryError as error:
        found = error
    return found
kept = attempt()
""",
    "a bound method": """
class Own(ValueError):
    def again(self): pass
kept = Own(big())
kept.handler = kept.again
""",
    "two errors that refer to each other": """
kept = ValueError(big())
kept.__cause__ = KeyError()
kept.__cause__.__context__ = kept
""",
}


def frees(kernel: Kernel, text: str) -> None:
    """Run the lines of a report that free memory; every watched array is dead then."""
    lines = LINE_OF_REPORT.findall(text)
    assert lines, text
    assert kernel.value("alive()") > 0
    for _, line in lines:
        run_cells(kernel, line)
    assert kernel.value("alive()") == 0, lines


@pytest.fixture
def errors(notebook: Kernel) -> Kernel:
    run_cells(notebook, SETUP)
    return notebook


@pytest.mark.parametrize("code", FAILING_CODE.values(), ids=FAILING_CODE)
def test_memory_held_by_the_last_error_is_named_and_freed(errors: Kernel, code: str) -> None:
    run_cells(errors, "watched.clear()")
    text = recovery_report(errors, code)
    frees(errors, text)
    run_cells(errors, "errors = None")


@pytest.mark.parametrize("code", STORED.values(), ids=STORED)
def test_a_stored_error_is_named_after_a_later_one(errors: Kernel, code: str) -> None:
    run_cells(errors, "watched.clear()", code, "pass")
    text = recovery_report(errors, "fail()")
    frees(errors, text)


VALUES = """
values = []
def value():
    array = np.ones(1 << 10)
    values.append(weakref.ref(array))
    return array
def kept_values():
    return sum(ref() is not None for ref in values)
"""


@pytest.mark.parametrize(("code", "container"), LOSES.values(), ids=LOSES)
def test_a_line_that_removes_other_objects_says_so(
    errors: Kernel, code: str, container: str
) -> None:
    run_cells(errors, "watched.clear()", VALUES, code, "pass")
    text = recovery_report(errors, "fail()")
    assert f"All other items of {container}" in text
    frees(errors, text)


@pytest.mark.parametrize("code", EXACT.values(), ids=EXACT)
def test_a_line_leaves_all_other_objects_alone(errors: Kernel, code: str) -> None:
    run_cells(errors, "watched.clear()", VALUES, code, "pass")
    count = errors.value("kept_values()")
    assert count > 0
    text = recovery_report(errors, "fail()")
    assert "All other items" not in text
    frees(errors, text)
    assert errors.value("kept_values()") == count
    if "kept" in code:
        assert errors.value("len(kept)") > 0


@pytest.mark.parametrize("code", CYCLES.values(), ids=CYCLES)
def test_errors_that_refer_to_themselves_are_collected(errors: Kernel, code: str) -> None:
    run_cells(errors, "watched.clear()", "gc.disable()", code, "pass")
    text = recovery_report(errors, "fail()")
    frees(errors, text)
    run_cells(errors, "gc.enable()")


def test_each_line_is_shown_once_and_the_rest_is_counted(errors: Kernel) -> None:
    run_cells(
        errors,
        """
        kept = [ValueError(big()) for _ in range(3)]
        rest = [1, *[ValueError(big(2)) for _ in range(8)]]
        """,
    )
    text = recovery_report(errors, "fail()")
    assert text.count("kept.clear()") == 1
    assert "the error in kept still holds 12 MiB" in text
    assert "4 more errors hold 8 MiB" in text


def test_a_variable_of_the_notebook_is_no_memory_of_an_error(errors: Kernel) -> None:
    text = recovery_report(
        errors,
        """
        mine = big()
        raise TooLarge("out of memory", mine)
        """,
    )
    assert LINE_OF_REPORT.findall(text) == []
    text = recovery_report(errors, 'raise TooLarge("out of memory", big(0))')
    assert LINE_OF_REPORT.findall(text) == []


def test_names_sizes_and_the_least_size_are_in_the_line(errors: Kernel) -> None:
    run_cells(errors, "watched.clear()")
    text = recovery_report(errors, 'raise TooLarge("out of memory", big(8))')
    assert LINE_OF_REPORT.findall(text) == [
        (
            "the last error still holds 8 MiB (args[1])",
            "import sys; sys.last_value = sys.last_exc = None",
        )
    ]
    run_cells(errors, "import sys; sys.last_value = sys.last_exc = None")
    run_cells(
        errors,
        """
        try: fail(16)
        except MemoryError as error: kept = [error, 1]
        """,
    )
    text = recovery_report(errors, "fail()")
    assert LINE_OF_REPORT.findall(text) == [
        ("the error in kept[0] still holds 16 MiB (local of fail())", "kept[0] = None")
    ]
    run_cells(errors, "kept = None", "%config IPyGpuMem.min_held_bytes = '64MiB'")
    assert (
        LINE_OF_REPORT.findall(recovery_report(errors, 'raise TooLarge("out of memory", big(8))'))
        == []
    )
    run_cells(errors, "%config IPyGpuMem.min_held_bytes = '1MiB'")


def test_no_code_of_an_error_runs(errors: Kernel) -> None:
    run_cells(
        errors,
        """
        ran = []
        class Hostile(MemoryError):
            def __getattribute__(self, name):
                ran.append(name)
                return MemoryError.__getattribute__(self, name)
            def __repr__(self): ran.append("repr"); return ""
            def __eq__(self, other): ran.append("eq"); return True
            def __hash__(self): ran.append("hash"); return 1
        kept = [Hostile(big()), Hostile(big()), 1]
        ran.clear()
        """,
    )
    text = recovery_report(errors, "fail()")
    assert errors.value("ran") == []
    frees(errors, text)


def test_a_magic_in_a_line_of_several_statements_is_a_call() -> None:
    references = [ErrorReference("Out[3]", "%xdel _3")]
    assert line_that_removes(references, collects=False) == "%xdel _3"
    references.append(ErrorReference("kept", "del kept"))
    assert (
        line_that_removes(references, collects=False)
        == 'del kept; get_ipython().run_line_magic("xdel", "_3")'
    )


def test_a_key_is_written_as_in_other_lines_that_free() -> None:
    error = ValueError(bytearray(4 << 20))
    for key, code in {"first": '"first"', (1, "a"): '(1, "a")', 2.5: "2.5", None: "None"}.items():
        errors = {key: error, "other": 1}
        reference = reference_to("errors", errors, (key,))
        assert line_that_removes([reference], collects=False) == f"errors[{code}] = None"


def test_a_search_for_errors_stops_with_its_allowance() -> None:
    error = ValueError(bytearray(4 << 20))
    own = {"errors": [error]}
    assert kept_errors.find([], own, own, Allowance(0)) == ()
    own = {"error": error}
    (kept_error,) = kept_errors.find([], own, own, Allowance(1000))
    assert kept_error.place == "error"
    assert kept_error.names == ("args[0]",)
    assert kept_error.remedy == "del error"


def test_a_search_in_many_small_containers_stops_too(monkeypatch: pytest.MonkeyPatch) -> None:
    read = [0]
    keyed_errors = stored_errors._keyed_errors

    def counted(container: object) -> list[tuple[object, BaseException]]:
        read[0] += 1
        return keyed_errors(container)

    monkeypatch.setattr(stored_errors, "_keyed_errors", counted)
    own = {"errors": [[ValueError(number) for _ in range(100)] for number in range(1000)]}
    kept_errors.find([], own, own, Allowance(1000))
    # As many of 1,000 lists as the allowance lets the search read.
    assert 40 <= read[0] <= 80


def test_the_search_for_cycles_reads_no_long_container(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [0]
    read = gc.get_referents

    def noted(*items: object) -> list[object]:
        original_result = read(*items)
        lengths.append(len(original_result))
        return original_result

    for value in ([[number] for number in range(50_000)], {number: [] for number in range(50_000)}):
        error = ValueError(value)
        monkeypatch.setattr(kept_errors.gc, "get_referents", noted)
        assert not kept_errors._keeps_itself(error, {})
        error.own = error  # type: ignore[attr-defined]
        assert kept_errors._keeps_itself(error, {})
        monkeypatch.undo()
        del error.own  # type: ignore[attr-defined]

    # The lists and the dict have 50,000 items.
    assert max(lengths) < 5000


def test_kept_errors_are_lossless_in_records() -> None:
    record = RecoveryRecord(
        "oom",
        "MemoryError",
        "",
        None,
        {},
        (),
        1,
        {},
        {},
        kept_errors=(KeptError("a[0]", 1, ("x",), "del a"),),
    )
    assert RecoveryRecord.from_dict(record.to_dict()) == record
