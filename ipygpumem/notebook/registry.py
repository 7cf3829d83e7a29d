"""The magics, their commands and their options, as data: lines are parsed by it, helped and completed from it.

A new command is an entry here and a module of ``commands`` with the function that the entry names.
"""

from __future__ import annotations

from typing import NamedTuple

# Tuples: a dataclass takes thrice the time to make, while the extension loads.


class Argument(NamedTuple):
    """What a command takes: an option, a switch, or words without a name.

    Args:
        usage: how it is written: ``--seed N``, ``--force``, ``--report full|none``; with dots, it takes several words.
        help: what it does.
        to: the name under which the command finds it; by default the option's own.
        type: what a word is turned into, one of ``parsing.TYPES``; or ``line``: several words are one text.
        default: what it is where it is left out.
        offers: the words that Tab offers, or which of ``completion.SOURCES`` knows them; by default the choices.
        missing: the question to ask where it is left out; without one, it may be.
    """

    usage: str
    help: str = ""
    to: str = ""
    type: str = "text"
    default: object = None
    offers: str | tuple[str, ...] = ()
    missing: str = ""

    @property
    def name(self) -> str:
        """The option's name; empty for words without one."""
        return self.usage.partition(" ")[0] if self.usage.startswith("-") else ""

    @property
    def attribute(self) -> str:
        """The name under which the command finds it."""
        return self.to or self.name.lstrip("-").replace("-", "_")

    @property
    def value(self) -> str:
        """How its value is called; a switch has none."""
        return self.usage.removeprefix(self.name).strip().removesuffix("...")

    @property
    def choices(self) -> tuple[str, ...]:
        """The only words that it takes."""
        return tuple(self.value.split("|")) if "|" in self.value else ()

    @property
    def is_many(self) -> bool:
        """Whether it is a list of words."""
        return self.usage.endswith("...")

    @property
    def takes_several(self) -> bool:
        """Whether more than one word may follow."""
        return self.is_many or self.type == "line"


class Command(NamedTuple):
    """A magic's line, or a command of a magic."""

    name: str
    help: str
    run: str = ""
    """Module and function in ``commands``: it takes the notebook, the options, and of a cell magic the cell.

    A mistake of the user is a ``GpuMemError`` or ``UsageError``, shown as one line.
    """
    arguments: tuple[Argument, ...] = ()
    commands: tuple[Command, ...] = ()
    ends_in_code: bool = False
    """Python code follows the options: it is passed on as ``code``, as it was written."""
    notes: str = ""
    """What stands below the help."""


class Magic(NamedTuple):
    """A magic as ``%name``, as ``%%name``, or as both."""

    name: str
    line: Command | None = None
    cell: Command | None = None
    is_rewritten: bool = False
    """Whether ``%%name`` as a cell's first line becomes a call, so that the body is a plain cell: see rewriting.py."""

    def command(self, kind: str) -> Command:
        """Return the command for ``line`` or ``cell``, or the only one there is."""
        found = self.line or self.cell if kind == "line" else self.cell or self.line
        assert found is not None
        return found

    @property
    def kinds(self) -> tuple[str, ...]:
        """What IPython is to know it as; the call that a first line becomes is one of a line magic."""
        is_line = self.line is not None or self.is_rewritten
        return ("line",) * is_line + ("cell",) * (self.cell is not None)


_DEVICE = Argument("--device D", offers=("cpu", "cuda"))
_MIN = Argument("--min SIZE", type="size")
_FORCE = Argument("--force")

_ON = Argument(
    "--on ENGINES",
    "on engines of an ipyparallel cluster: all, 0-3, or a view's name",
    offers=("all",),
)

_SCOPE = (
    Argument("NAME", to="name", type="line", missing="which name? Write it before the options: NAME --keep x"),
    Argument("--keep NAME...", "names or globs that stay, with blanks or commas: --keep model 'loss*'", offers="names"),
    Argument("--drop-imports", "delete the names of imported modules too"),
    Argument("--seed N", "reset Python's, NumPy's and torch's random generators first", type="int"),
    Argument("--report full|compact|none", "how much to show at the end"),
    Argument("--note NAME=VALUE...", "parameters to remember with it: --note lr=1e-3 bs=64"),
    Argument("--budget gpu=SIZE...", "let torch have no more of a GPU: --budget gpu=8GiB"),
    Argument("--record FILE", "where CUDA memory was allocated, for torch's memory viewer (.pickle)"),
    _ON,
)
_END = (Argument("NAME", to="name", type="line", offers="open"), _ON)
_WHICH_NAMES = "which names? For instance: %experiment keep model 'loss*'"
_KEPT = Argument("NAME...", to="names", offers="names", missing=_WHICH_NAMES)
_COMPARED = Argument("NAME...", to="names", offers="finished")

_EXPERIMENT = Command(
    "%experiment",
    "Open and close scopes over many cells.",
    commands=(
        Command("start", "open one:", "experiment.start", _SCOPE),
        Command("end", "delete its names, restore what they shadowed, give memory back", "experiment.end", _END),
        Command("keep", "names, or globs such as 'y*', that stay at the end", "experiment.keep", (_KEPT,)),
        Command("status", "what is open, and what it costs so far", "experiment.status"),
        Command("list", "the finished ones, one row each", "experiment.list_experiments"),
        Command(
            "compare",
            "finished ones side by side: names, globs, or A#2 for the second run of A",
            "experiment.compare",
            (_COMPARED,),
        ),
    ),
    notes="``%%experiment NAME`` as a cell's first line does all of it for that one cell.",
)
_EXPERIMENT_CELL = Command(
    "%%experiment",
    "Run one cell as a scope, like a function: afterwards its names are gone and its memory is back.",
    "experiment.start_cell",
    _SCOPE,
)

_TENSORS = (
    Argument("NAME...", to="names"),
    _DEVICE,
    _MIN,
    Argument("--kind parameter|gradient|optimizer|buffer|other", type="kind"),
    Argument("--by name|shape|kind|cell|device"),
    Argument("--top N", type="count", default=20),
)
_HISTORY = (Argument("-n 20", type="count", default=20), Argument("--experiment NAME", offers="finished"))
_EXPORTED = Argument("FILE", to="file", offers="exports", missing="which file? Its suffix says the format")
_PLOT = (
    Argument("session|devices|experiments", to="picture", default="session"),
    Argument("--device D", offers=("RAM", "cuda")),
    Argument("-n N", type="int"),
    Argument("--save FILE", offers="pictures"),
    _FORCE,
)
_RECORD = (
    Command("on", "begin", "gpumem.record_on"),
    Command("off", "end", "gpumem.record_off"),
    Command("status", "whether it is on, and where recordings are", "gpumem.record_status"),
)
_WHAT_GOES = "which object? For instance: %gpumem release learner"
_WHICH_MODEL = "which model? For instance: %gpumem purge model optimizer"
_RELEASE = (Argument("NAME...", to="names", offers="names", missing=_WHAT_GOES),)
_PURGE = (Argument("NAME...", to="names", offers="names", missing=_WHICH_MODEL),)
_POSTMORTEM = (Argument("FILE", to="file", offers="recordings"),)

_GPUMEM = Command(
    "%gpumem",
    "Control ipygpumem.",
    commands=(
        Command("on", "show the line after each cell", "gpumem.switch_on"),
        Command("off", "show it no more; measuring goes on", "gpumem.switch_off"),
        Command("status", "what is on, which experiments are open, each device's memory now", "gpumem.status", (_ON,)),
        Command("preload", "create the accelerator's context now, and say what it costs", "gpumem.preload"),
        Command("free", "give memory back now: stored tracebacks, garbage, caches", "gpumem.free", (_ON,)),
        Command("release", "empty an object and free what only it holds", "gpumem.release", _RELEASE),
        Command(
            "purge",
            "defragment: move a model, and its optimizer's state, off the device and back",
            "gpumem.purge",
            _PURGE,
        ),
        Command("leaks", "what did not come back, and who holds it", "leaks.leaks", (_MIN, _ON)),
        Command("tensors", "tensors and arrays by storage", "tensors.tensors", _TENSORS),
        Command("history", "one row per finished cell", "gpumem.history", _HISTORY),
        Command("export", "what has finished, as .json or .csv", "gpumem.export", (_EXPORTED, _FORCE)),
        Command("plot", "a picture:", "gpumem.plot", _PLOT),
        Command("record", "keep a recording that outlives the kernel:", commands=_RECORD),
        Command("postmortem", "how the last kernel died that was recorded", "gpumem.postmortem", _POSTMORTEM),
    ),
    notes="All options: ``%config IPyGpuMem``.",
)

_AUTOFIT = Command(
    "%%autofit",
    "Run a cell again with a smaller value until it fits in memory; the variable then holds that value.",
    "autofit.fit_cell",
    (
        Argument(
            "NAME=VALUE...",
            "such as batch_size=1024; several are reduced in turn; NAME alone: from its value now",
            "variables",
            offers="numbers",
            missing="which variable? For instance: %%autofit batch_size=1024",
        ),
        Argument("--min N...", "the smallest value, for all or each: --min batch_size=8 seq_len=128"),
        Argument(
            "--step STEP",
            "halve, a factor such as 0.9, or search: down by halves, then up to the largest that fits",
            default="halve",
            offers=("halve", "search", "0.9"),
        ),
        Argument("--headroom 5%", "the share of the device's memory that must stay free at the peak"),
        Argument("--max-tries 10", "the most tries after the first", type="int", default=10),
    ),
    notes="A function is fitted by ``ipygpumem.autofit``.",
)

_ESTIMATE = Command(
    "%%estimate",
    "Say what a cell would take, without running it on a device: its tensors are fake.",
    "estimate.estimate",
    (
        Argument("--device-memory SIZE", "does it fit in this much? Without: in what is free", type="size"),
        Argument(
            "--device D", "take all tensors to be on this device, which need not be here", offers=("cpu", "cuda:0")
        ),
        Argument("--timeout SECONDS", "stop it then, and name the line; 300 without", type="float"),
    ),
)

_MEASURED = (
    Argument("-r RUNS", "measured runs of each, after one to warm up (5)", type="runs", default=5),
    Argument("-s 'SETUP'", "code to run before each run, not measured", default=""),
)
_WHICH_STATEMENT = "which statement? For instance: %gpumemit -r 3 torch.relu(x)"
_STATEMENT = Argument("STATEMENT", to="code", type="line", offers="names", missing=_WHICH_STATEMENT)
_OWN_NAMES = "Names that a statement binds are its own; what it does to your objects stays done."

_GPUMEMIT = Command(
    "%gpumemit",
    "Say what a statement costs: memory kept, its peak, and the time.",
    "gpumemit.statement",
    (*_MEASURED, _STATEMENT),
    ends_in_code=True,
    notes=f"{_OWN_NAMES} ``%%gpumemit`` compares several.",
)
_GPUMEMIT_CELL = Command(
    "%%gpumemit",
    "Say what statements cost, side by side: memory kept, its peak, and the time.\n\n"
    "Each line of the cell is a statement; longer ones stand between lines ``---``.",
    "gpumemit.statements",
    _MEASURED,
    ends_in_code=True,
    notes=_OWN_NAMES,
)

_MEMLINES = Command(
    "%%memlines",
    "Say of each line of a cell, and of functions, what it kept, its peak, its runs and its time.",
    "memlines.follow_cell",
    (
        Argument("-f FUNCTION...", "a function or method to follow too: -f train Model.forward", offers="functions"),
        Argument("--sort line|kept|peak|time|hits", "the lines that ran, those that cost most first", default="line"),
    ),
)

MAGICS = (
    Magic("experiment", _EXPERIMENT, _EXPERIMENT_CELL, is_rewritten=True),
    Magic("gpumem", _GPUMEM),
    Magic("gpumemit", _GPUMEMIT, _GPUMEMIT_CELL),
    Magic("memlines", cell=_MEMLINES, is_rewritten=True),
    Magic("autofit", cell=_AUTOFIT, is_rewritten=True),
    Magic("estimate", cell=_ESTIMATE),
)

REWRITTEN = tuple(magic.name for magic in MAGICS if magic.is_rewritten)
