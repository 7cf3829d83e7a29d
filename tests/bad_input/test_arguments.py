"""Lines and arguments that are wrong or long, and names to keep that are not there."""

import re
import sys

import pytest
from IPython.core.interactiveshell import InteractiveShell

import ipygpumem
from ipygpumem.errors import GpuMemError
from ipygpumem.features import all_features
from ipygpumem.shell.app import app_of
from ipygpumem.shell.commands.parsing import parse

pytestmark = pytest.mark.usefixtures("others_out_of_sight")
WRONG = [
    ("%experiment", "a command is missing"),
    ("%experiment", "or write %%experiment as the first line of a cell"),
    ("%gpumem memory", "did you mean status?"),
    ("%gpumem clear", "did you mean free?"),
    ("%gpumem variables", "did you mean top?"),
    ("%experiment stop", "did you mean end?"),
    ("%experiment bogus", "bogus"),
    ("%experiment end", "no experiment is open"),
    ("%experiment start", "name"),
    ("%experiment start --budget gpu=4GiB run", "Write it first"),
    ("%experiment start a --bogus", "--bogus"),
    ("%%experiment a --bogus 3\nx = 1", "--bogus"),
    ("%experiment start a --help", "--help"),
    ("%experiment start a --see 1", "--see"),
    *((f"%experiment start a --seed {seed}", "--seed") for seed in ("x", "9" * 26, "-" + "9" * 26)),
    ("%experiment start a --report loud", "--report"),
    ("%experiment start a --keep", "--keep"),
    ("%experiment start a --keep 'x y'", "x y"),
    ("%experiment start don't", "quotation"),
    ("%%experiment train keep model\nx = 1", "write train --keep model"),
    ("%%experiment train \N{EN DASH}keep model\nx = 1", "write train --keep model"),
    ("%experiment start train keep model", "write train --keep model"),
    ("%experiment start train keep=model loss", "write train --keep model loss"),
    ("%experiment start train # the last\nx = 1", "put the comment on its own line"),
    ("%%experiment my run\nx = 1", "my-run"),
    (
        "%%experiment a --note b\nx = 1",
        "--note: 'b' is not NAME=VALUE, such as --note lr=1e-3 bs=64",
    ),
    ("%%experiment --note lr=1 run\nx = 1", "--note: 'run' is not NAME=VALUE"),
    ("%%experiment 'unclosed\nx = 1", "quotation"),
    ("%gpumem bogus", "status"),
    ("%gpumem stauts", "(did you mean status?)"),
    ("%gpumem Tensor", "(did you mean tensors?)"),
    ("%gpumem recorder of", "(did you mean off?)"),
    ("%experiment strat a", "(did you mean start?)"),
    ("%gpumem tensors --tpo 3", "(did you mean --top?)"),
    ("%%experiment a --sed 3\nx = 1", "(did you mean --seed?)"),
    ("%gpumem quiet onn", "invalid choice: 'onn' (did you mean on?); use on, off"),
    ("%%experiment a --report ful\nx = 1", "--report: invalid choice: 'ful' (did you mean full?)"),
    ("%gpumem tensors --kind optimiser", "(did you mean optimizer?)"),
    ("%gpumem top modle", "no name matches 'modle'"),
    ("%gpumem top 0", "no name matches '0'"),
    ("%gpumem tensors 'lossess*'", "no name matches 'lossess*'"),
    ("%gpumem top --min -1MiB", "--min: a size cannot be negative: '-1MiB'"),
    ("%gpumem top --min=-1 MiB", "--min: a size cannot be negative: '-1MiB'"),
    ("%gpumem top --min -1", "a size cannot be negative"),
    ("%gpumem top --min 5 MB/s", "'5' has no unit"),
    (
        "%%experiment a --budget gpu=1 MiB 3 GiB\nx = 1",
        "'3GiB' must be a device and a size: write for instance gpu=",
    ),
    *(
        (f"{line} 0", "0 is not a whole number ")
        for line in ("%gpumem history -n", "%gpumem plot -n", "%gpumemit -r")
    ),
    *(
        (f"%gpumem tensors --top {value}", "is not a whole number ")
        for value in ("-1", "1.5", "9" * 5000, "x")
    ),
    *(
        (f"%%estimate --timeout {value}\nx = 1", "not a number from 0.001 to 1e+09")
        for value in ("0", "1e400", "x")
    ),
    *(
        (f"%gpumem {line} --min 24", "'24' has no unit: write 24GiB, or 24 bytes")
        for line in ("tensors", "leaks")
    ),
    ("%%estimate --device-memory 24B\nx = 1", "24 B is too little"),
    ("%experiment start a --budget gpu=-1GiB", "a size cannot be negative: '-1GiB'"),
    *(
        (f"%%autofit n={value}\nx = n", "autofit reduces finite numbers below 2**63")
        for value in ("-inf", "9" * 5000)
    ),
    ("%%autofit batch_size=8 --min inf\nx = batch_size", "the minimum of batch_size is inf"),
    ("%%isolate --keep 'x y'\n1", "'x y' is neither a name nor a glob"),
    ("%%isolate --time 0\n1", "--time: 0 is not a number from 0.001"),
    ("%%isolate --memory 3\n1", "--memory: '3' has no unit"),
    ("%%isolate --memory 3 KiB\n1", "3 KiB is too little: write a size of 64 MiB or more"),
    ("%%isolate x\n1", "'x' cannot stand alone; use --keep, --memory, --time"),
    ("%gpumem leaks all", "'all' cannot stand alone; use --min, --on"),
    ("%gpumem history x", "'x' cannot stand alone; use -n, --experiment"),
    ("%gpumem hlep", "(did you mean help?)"),
    ("%gpumem on off", "takes none"),
    ("%gpumemit", "which statement"),
    ("%gpumemit -r 0 block", "-r 0"),
    (
        "%gpumemit --repeat 3 block",
        "'--repeat' is not an option; use -r RUNS or -s 'SETUP', or put (...) around",
    ),
    ("%%gpumemit block\nblock", "'block' cannot stand on the first line"),
    ("%gpumemit block +", "gpumemit: invalid syntax: 'block +'"),
    ("%gpumemit await block", "gpumemit cannot measure await: run it in a plain cell"),
    ("%%gpumemit\nfor x in []: pass\nawait block", "gpumemit cannot measure await"),
    ("%gpumemit -s 'return' block", "gpumemit: 'return' outside function: 'return'"),
    ("%%autofit nothing\nwork(1)", "there is no variable 'nothing'"),
    ("%%autofit work\nwork(1)", "work is a function"),
    ("%%autofit size=big\nwork(1)", "size: 'big' is not a number"),
    ("%%autofit 3=4\nwork(1)", "'3=4' is not a variable"),
    ("%%autofit size=4 --min other=8\nwork(1)", "the minimum of other"),
    ("%%autofit\nwork(1)", "which variable? For instance: %%autofit batch_size=1024"),
    ("%%autofit size=4\n", "the cell is empty"),
    ("%%autofit size=4\n%%autofit other=4\nwork(1)", "an autofit is already running"),
    ("%autofit size=4", "write %%autofit as the first line of a cell"),
    ("%%autofit size=400\nsize = 300\nwork(size)", "the cell sets size itself"),
    ("%%autofit size=64\nsize = size // 2\nwork(size)", "the cell sets size itself"),
    ("%%autofit size=64\n%%capture\nfor size in range(4): work(size)", "the cell sets size itself"),
    ("%%peak\n\n", "the cell is empty: write the code to measure below the line with %%peak"),
    ("%%experiment a\n%%peak --top 3", "the cell is empty"),
    ("%memlines", "write %%memlines as the first line"),
    ("%%memlines -f nosuch\n1", "there is no 'nosuch' here"),
    ("%%memlines -f In\n1", "not a function"),
    ("%%memlines -f In.append\n1", "no lines of Python"),
    ("%%memlines -f '1 + 1'\n1", "'1 + 1' is not a name"),
]


def refused(shell: InteractiveShell, code: str) -> str:
    """Run a cell that must end with one line of ``UsageError``; return that line."""
    error = shell.run_cell(code).error_in_exec
    assert type(error).__name__ == "UsageError", (code[:200], error)
    assert "\n" not in str(error)
    return str(error)


def open_and_names(shell: InteractiveShell) -> tuple[list[str], list[str]]:
    return [item.name for item in app_of(shell).experiments.open], shell.run_line_magic(
        "who_ls", ""
    )


def test_a_wrong_line_gets_a_line_and_opens_nothing(
    loaded: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    loaded.run_cell("def work(size):\n    if size > 100: raise MemoryError")
    for line, part in WRONG:
        assert part in refused(loaded, line), line
        assert open_and_names(loaded) == ([], ["work"]), line


def test_a_size_may_have_a_space_before_its_unit() -> None:
    for magic, line, options in (
        ("%%isolate", "--memory 512 MiB --keep m b", {"memory": 512 << 20, "keep": ["m", "b"]}),
        ("%gpumem", "top --min 5 mb -n 20 m", {"min": 5_000_000, "n": 20, "names": ["m"]}),
        ("%gpumem", "top --min=1.5 GiB", {"min": 3 << 29}),
        ("%gpumem", "top --min 0 m", {"min": 0, "names": ["m"]}),
        (
            "%%estimate",
            "--fit 8 GiB --device-memory 1 G",
            {"fit": "8GiB", "device_memory": 1 << 30},
        ),
        (
            "%%experiment",
            "a --budget gpu=8 GiB cuda:1=4GiB",
            {"budget": ["gpu=8GiB", "cuda:1=4GiB"]},
        ),
    ):
        assert vars(parse(all_features().commands, magic, line)[1]).items() >= options.items(), line


def test_gpumem_alone_shows_a_short_status_a_hint(
    loaded: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded.run_cell(
        """
        import numpy
        big, less = numpy.ones(1 << 20), [numpy.ones(1 << 18)]
        x = y = numpy.ones(1 << 10)
        """
    )
    capsys.readouterr()
    loaded.run_line_magic("gpumem", "")
    head, largest, following = capsys.readouterr().out.splitlines()
    assert "ipygpumem · reports on · " in head
    assert " · RAM " in head
    assert largest.strip() == "largest names: big 8 MiB, less 2 MiB, x 8.1 KiB"
    assert "next: %gpumem top" in following

    # The second look shows changes, too.
    loaded.run_cell("del less; new = numpy.ones(1 << 22)")
    capsys.readouterr()
    loaded.run_line_magic("gpumem", "")
    changes = capsys.readouterr().out.splitlines()[-2]
    assert "since the last look: " in changes
    assert "new +32 MiB, " in changes
    assert changes.endswith("less -2 MiB")


def test_wrong_arguments_are_refused_early_and_delete_no_names(loaded: InteractiveShell) -> None:
    wrong = ("keep=5", "keep=None", "keep=[1]", "note=5", "budget=5", "seed='x'", "seed=1 << 80")
    wrong += ("report='loud'",)
    for arguments in ("7", "''", *(f"'a', {one}" for one in wrong)):
        loaded.run_cell(
            f"import ipygpumem\nx = 'old'\ndef attempt(): return "
            f"ipygpumem.experiment({arguments}).start()"
        )
        error = loaded.run_cell("handle = attempt()\nx = 'new'").error_in_exec
        assert isinstance(error, GpuMemError), (arguments, error)
        assert (loaded.user_ns["x"], open_and_names(loaded)[0]) == ("old", [])


def test_a_misspelt_name_to_keep_deletes_nothing(
    loaded: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded.run_cell("%%experiment a --keep modle --keep 'no*' --keep here\nhere, model = 1, 2")
    text = capsys.readouterr().out
    assert all(f"no name matches '{name}'" in text for name in ("modle", "no*"))
    assert "(did you mean model?): nothing was deleted" in text
    assert "'here'" not in text
    assert open_and_names(loaded)[1] == ["here", "model"]
    loaded.run_cell("%%experiment b --keep modle --keep 'no*' --report none\nmodel = 3")
    text = capsys.readouterr().out
    assert all(
        text.count(f"experiment b: keep: no name matches '{name}'") == 1
        for name in ("modle", "no*")
    )
    assert loaded.user_ns["model"] == 3
    # A name that the code would have bound is no slip: nothing keeps the memory of what failed.
    error = loaded.run_cell("""\
%%experiment c --keep late
early = 1
1 / 0
late = 2""").error_in_exec
    assert type(error) is ZeroDivisionError
    assert open_and_names(loaded)[1] == ["here", "model"]


LONG = "x" * 100_000
MOST_CHARACTERS = 800


@pytest.mark.parametrize(
    "path", [LONG, "/tmp/" + "/".join(["d" * 200] * 500), "~" + LONG, "a\0" + LONG]
)
@pytest.mark.parametrize("end", [".json", "/none.pickle", ""])
def test_a_path_of_any_length_is_shortened(end: str, path: str) -> None:
    with pytest.raises(GpuMemError) as raised:
        ipygpumem.load(path + end)
    assert len(str(raised.value)) < MOST_CHARACTERS


def test_a_long_argument_in_a_notebook_is_shortened(loaded: InteractiveShell) -> None:
    loaded.run_cell("""
        import ipygpumem
        x = 'x' * 100_000
        long = 'x' * 3000
        """)
    for call in (
        *(f"export({path})" for path in ("x", "x + '.json'", "'~' + x + '.json'", "x + '/a.json'")),
        *(
            "experiment('n', report=x)",
            "experiment('n', report=[x])",
            "experiment(x).usage()",
            "tracker(x + '/none')",
        ),
    ):
        error = loaded.run_cell(f"ipygpumem.{call}").error_in_exec
        assert type(error).__name__ in ("FileError", "ExperimentError"), (call, error)
        assert len(str(error)) < MOST_CHARACTERS, call
    for line in (
        *(
            "%gpumem export {long}.json",
            "%gpumem plot session {long}",
            "%gpumem postmortem ~{long}",
        ),
        *("%gpumem history --experiment {long}", "%gpumem compare {long} other"),
        "%experiment start a --report {long}",
    ):
        assert len(refused(loaded, line)) < MOST_CHARACTERS, line


@pytest.mark.parametrize("value", ["3", "None", "'train'"])
def test_an_estimate_of_no_function_shows_only_the_users_line(
    loaded: InteractiveShell, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    loaded.user_ns["estimate"] = ipygpumem.estimate
    result = loaded.run_cell(f"estimate({value})")
    assert isinstance(result.error_in_exec, TypeError)
    shown = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)  # without colours
    assert "estimate takes a function and its arguments" in shown
    assert f"estimate({value})" in shown
    assert "fitting.py" not in shown
