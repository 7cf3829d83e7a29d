"""Runs a scenario in a real kernel, with one way of cleaning up at its end, and says what came back."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.kernel import Kernel, Reply
from tests.torture.scenario import Cell, Scenario

ROOT = Path(__file__).resolve().parents[2]
NEEDED_SHARE = 0.99
_BLOCKS = "__import__('tests.torture.blocks', fromlist=['blocks'])"
_QUESTIONS = ("leaks", "tensors --min 1MiB")
"""The latter tells of arrays that never had a name of their own and are plain data of a notebook variable now."""
_PRELUDE = "from tests.torture.blocks import array, tensor, to_gpu, watch"


@dataclass(frozen=True)
class Way:
    """One way of cleaning up.

    Args:
        name: what the table calls it.
        package: what must be installed for it.
        load: the cell that makes the tool ready, once for each kernel.
        start: the cell that opens the scope.
        end: the cell that closes it.
        first_line: what turns a single cell into a scope; such a way has no ``start`` and no ``end``.
    """

    name: str
    package: str = ""
    load: str = ""
    start: str = ""
    end: str = ""
    first_line: str = ""

    def serves(self, scenario: Scenario) -> bool:
        """Whether a scenario can be run in this way."""
        return not self.first_line or len(scenario.cells) == 1

    @property
    def installed(self) -> bool:
        """Whether its package is there."""
        return not self.package or importlib.util.find_spec(self.package) is not None


PLAIN = Way("plain", end=f"{_BLOCKS}.clean_plainly(get_ipython().user_ns)")
PEER = Way(
    "ipyexperiments",
    package="ipyexperiments",
    load="from ipyexperiments import IPyExperimentsCPU",
    start="exp = IPyExperimentsCPU()",
    end="del exp",
)
SPAN = Way("%experiment", load="%load_ext ipygpumem", start="%experiment start torture", end="%experiment end")
CELL = Way("%%experiment", load="%load_ext ipygpumem", first_line="%%experiment torture\n")
OURS = (SPAN, CELL)
WAYS = (PLAIN, PEER, *OURS)


@dataclass(frozen=True)
class Result:
    """What one scenario gave in one way; ``trouble`` says why there is no figure.

    ``on_gpu_bytes`` are those of the bytes made that are on a GPU. ``rss_left_bytes`` is how far the RSS is above its
    start, ``gpu_left_bytes`` the same of what torch has allocated on the GPU.
    """

    scenario: str
    way: str
    made_bytes: int = 0
    recovered_bytes: int = 0
    on_gpu_bytes: int = 0
    rss_left_bytes: int = 0
    gpu_left_bytes: int = 0
    told: str = ""
    """What we say afterwards of memory that is held on purpose."""
    trouble: str = ""
    seconds: float = 0.0

    @property
    def share(self) -> float:
        """How much of the bytes came back, from 0 to 1."""
        return self.recovered_bytes / self.made_bytes if self.made_bytes else 0.0

    def meets(self, wanted: float) -> bool:
        """Whether this is what the scenario states: nearly all, or all but what is held on purpose."""
        if self.trouble or self.made_bytes < 64 << 20:
            return False
        if wanted == 1.0:
            return self.share >= NEEDED_SHARE
        return abs(self.share - wanted) <= 1 - NEEDED_SHARE


class TortureKernel(Kernel):
    """A kernel that answers where a cell asks for input, and in whose profile nothing stays."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="torture-")
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(ROOT)]))
        default = {"TORCHINDUCTOR_CACHE_DIR": f"{self._folder.name}/inductor"}
        env = {**default, **os.environ, **variables, "IPYTHONDIR": self._folder.name, "PYTHONPATH": path}
        super().__init__("--log-level=ERROR", *arguments, env=env)
        self.answers: list[str] = []

    def run(self, code: str, **options: Any) -> Reply:
        return super().run(code, allow_stdin=bool(self.answers), **options)

    def _take(self, message_id: str, outputs: Reply) -> bool:
        with contextlib.suppress(queue.Empty):
            self._client.get_stdin_msg(timeout=0)
            self._client.input(self.answers.pop(0) if self.answers else "q")
        return super()._take(message_id, outputs)

    def settle(self) -> None:
        """Wait until the kernel takes cells again: it refuses what comes right after an error."""
        while self.run("", silent=True).status == "aborted":
            time.sleep(0.01)

    def close(self) -> None:
        super().close()
        self._folder.cleanup()


class Runner:
    """Runs scenarios in one way, in one kernel as long as each leaves it as it found it.

    Args:
        way: how the scopes are cleaned up.
        fresh: start a kernel for each scenario.
        gpu: let the blocks be tensors on the GPU.
    """

    def __init__(self, way: Way, *, fresh: bool = False, gpu: bool = False) -> None:
        self._way = way
        self._fresh = fresh
        self._gpu = gpu
        self._kernel: TortureKernel | None = None

    def run(self, scenario: Scenario) -> Result:
        """Return what ``scenario`` gave; whatever goes wrong is the result's ``trouble``."""
        started = time.monotonic()
        try:
            result = self._try(scenario)
            stays = not (self._fresh or scenario.alone or scenario.options) and self._is_clean()
        except (AssertionError, TimeoutError, RuntimeError, queue.Empty) as problem:
            result = Result(scenario.name, self._way.name, trouble=f"{type(problem).__name__}: {problem}")
            stays = False
        seconds = time.monotonic() - started
        if not stays:
            self.close()
        return Result(**{**vars(result), "seconds": seconds})

    def close(self) -> None:
        """End the kernel."""
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None

    def _is_clean(self) -> bool:
        """Delete the notebook's names; return whether all that the scenario made is dead then."""
        assert self._kernel is not None
        _ok(self._kernel, "%xmode Context")
        _ok(self._kernel, "%reset -f")  # collects, too
        found = _measure(self._kernel)
        return found["dead"] >= NEEDED_SHARE * found["made"]

    def _ready(self, scenario: Scenario) -> TortureKernel:
        if scenario.options:
            self.close()
        if self._kernel is None:
            self._kernel = TortureKernel(*scenario.options, **({"TORTURE_GPU": "1"} if self._gpu else {}))
        kernel = self._kernel
        imports = [f"import {name}" for name in scenario.needs if name != "matplotlib"]
        for code in (_PRELUDE, "\n".join(imports), self._reload(), scenario.before):
            _ok(kernel, code)
        return kernel

    def _reload(self) -> str:
        return self._way.load.replace("load_ext", "reload_ext")

    def _try(self, scenario: Scenario) -> Result:
        way, kernel = self._way, self._ready(scenario)
        kernel.value(f"{_BLOCKS}.begin(get_ipython().user_ns)")
        before = _measure(kernel)
        _ok(kernel, way.start)
        for cell in (self._gpu and scenario.on_gpu) or scenario.cells:
            _run(kernel, Cell(way.first_line + cell.code, cell.raises, cell.answers), scenario.timeout)
        _ok(kernel, way.end)
        after = _measure(kernel)
        result = Result(
            scenario.name,
            way.name,
            made_bytes=after["made"],
            recovered_bytes=after["dead"],
            rss_left_bytes=after["rss"] - before["rss"],
            on_gpu_bytes=after["on_gpu"],
            gpu_left_bytes=after["gpu"] - before["gpu"],
        )
        if way in OURS:
            holder = scenario.holder if result.meets(scenario.share) else None
            result = replace(result, told=_told(kernel, holder))
        return result


def _measure(kernel: Kernel) -> dict[str, int]:
    found: dict[str, int] = kernel.value(f"{_BLOCKS}.report()")
    return found


def _told(kernel: TortureKernel, holder: str | None) -> str:
    """Ask until ``holder`` is told of, or all there is to ask; return all that was told."""
    told = ""
    for question in _QUESTIONS:
        if holder is None or holder not in told:
            told += "\n".join(kernel.run(f"%gpumem {question}").reports())
    return told


def _ok(kernel: TortureKernel, code: str) -> None:
    if code:
        _run(kernel, Cell(code), 120)


def _run(kernel: TortureKernel, cell: Cell, timeout: float) -> None:
    kernel.answers[:] = cell.answers
    reply: Any = kernel.run(cell.code, timeout=timeout)
    if reply.status == "error":
        kernel.settle()
    # IPython shows a group by its own means and sends no error; others show an error and succeed.
    as_expected = reply.error in (None, cell.raises) if cell.raises else True
    if not as_expected or reply.status != ("error" if cell.raises else "ok"):
        raise AssertionError(f"{cell.code}\nended with {reply.status} {reply.error} {reply.message}\n{reply.stderr}")
    if "ipygpumem:" in reply.stderr:
        raise AssertionError(reply.stderr)


def run_all(scenarios: Iterable[Scenario], ways: Iterable[Way], *, fresh: bool = False) -> Iterator[Result]:
    """Yield the results of all ``scenarios``, one way after the other."""
    chosen = list(scenarios)
    for way in ways:
        runner = Runner(way, fresh=fresh)
        try:
            yield from (runner.run(scenario) for scenario in chosen if way.serves(scenario) and not scenario.missing())
        finally:
            runner.close()
