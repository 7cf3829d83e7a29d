"""Runs a scenario in a real kernel, with one way of cleaning up at its end, and measures the bytes
that are freed.
"""

import os
import queue
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.harness.kernel import Kernel
from benchmarks.harness.scenarios import Cell, Scenario

ROOT = Path(__file__).parents[2]
NEEDED_SHARE = 0.99
_BLOCKS = "__import__('benchmarks.harness.blocks', fromlist=['blocks'])"
_QUESTIONS = ("leaks", "tensors --min 1MiB")
"""Arguments of ``%gpumem``. The second one lists arrays, too, that never had a name and are plain
data of a notebook variable now.
"""
_LINES = "[row.holder.advice for row in __import__('ipygpumem').experiments()[-1].survivors]"
_PRELUDE = "from benchmarks.harness.blocks import array, tensor, to_gpu, watch"


@dataclass(frozen=True)
class Way:
    """One way of cleaning up: cells that make a tool ready, open the scope and close it, or a
    cell's first line.
    """

    name: str
    load: str = ""
    start: str = ""
    end: str = ""
    first_line: str = ""

    def serves(self, scenario: Scenario) -> bool:
        """Return True if a scenario can be run in this way."""
        return not self.first_line or len(scenario.cells) == 1


PLAIN = Way("plain", end=f"{_BLOCKS}.clean_plainly(get_ipython().user_ns)")
PEER = Way(
    "ipyexperiments",
    "from ipyexperiments import IPyExperimentsCPU",
    "exp = IPyExperimentsCPU()",
    "del exp",
)
SPAN = Way(
    "%experiment",
    load="%reload_ext ipygpumem",
    start="%experiment start torture",
    end="%experiment end",
)
CELL = Way("%%experiment", load="%reload_ext ipygpumem", first_line="%%experiment torture\n")
OURS = (SPAN, CELL)
WAYS = (PLAIN, PEER, *OURS)


@dataclass(frozen=True)
class Result:
    """Result of one scenario in one way; ``trouble`` says why there is no figure."""

    scenario: Scenario
    made_bytes: int = 0
    recovered_bytes: int = 0
    on_gpu_bytes: int = 0
    gpu_left_bytes: int = 0
    """Growth of torch's allocated memory on the GPU since the start."""
    told: str = ""
    """Report of ipygpumem on memory that is held on purpose."""
    trouble: str = ""

    @property
    def share(self) -> float:
        """The freed share of the bytes that the scenario made."""
        if not self.made_bytes:
            return 0.0
        return self.recovered_bytes / self.made_bytes

    def is_met(self) -> bool:
        """Return True if the scenario states this outcome: nearly all, or all but memory held on
        purpose.
        """
        if self.trouble or self.made_bytes < 64 << 20:
            return False
        return abs(self.share - self.scenario.share) <= 1 - NEEDED_SHARE


class TortureKernel(Kernel):
    """A kernel whose IPython profile is in a temporary folder."""

    def __init__(self, **variables: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="torture-")
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(ROOT)]))
        default = {"TORCHINDUCTOR_CACHE_DIR": f"{self._folder.name}/inductor"}
        env = {
            **default,
            **os.environ,
            **variables,
            "IPYTHONDIR": self._folder.name,
            "PYTHONPATH": path,
        }
        # Writing the history to the disk after each cell takes longer than a short cell.
        super().__init__("--log-level=ERROR", "--HistoryManager.db_cache_size=1000", env=env)

    def close(self) -> None:
        super().close()
        self._folder.cleanup()


class Runner:
    """Runs scenarios in one way, in one kernel as long as each leaves it as it found it; ``gpu``:
    on the GPU.
    """

    def __init__(self, way: Way, *, gpu: bool = False) -> None:
        self._way = way
        self._gpu = gpu
        self._kernel: TortureKernel | None = None

    def run(self, scenario: Scenario) -> Result:
        """Return the result of ``scenario``; any error is the result's ``trouble``."""
        try:
            result = self._try(scenario)
            stays = not scenario.alone and self._is_clean()
        except (AssertionError, TimeoutError, RuntimeError, queue.Empty) as problem:
            result = Result(scenario, trouble=f"{type(problem).__name__}: {problem}")
            stays = False
        if not stays:
            self.close()
        return result

    def run_with_lines(self, scenario: Scenario) -> Result:
        """Return the result of `scenario` after running its report's lines, too."""
        stays = False
        try:
            result = self._try(scenario)
            assert self._kernel is not None
            for line in self._kernel.value(_LINES):
                _ok(self._kernel, line)
            _ok(self._kernel, "import gc; gc.collect();")  # a closed figure is a cycle
            recovered = _measure(self._kernel)["dead"]
            stays = not scenario.alone and self._is_clean()
        finally:
            if not stays:
                self.close()
        return replace(result, recovered_bytes=recovered)

    def close(self) -> None:
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None

    def _is_clean(self) -> bool:
        """Delete the notebook's names; return True if nearly all the scenario's memory is freed."""
        assert self._kernel is not None
        _ok(self._kernel, "%xmode Context")
        _ok(self._kernel, "%reset -f")  # collects, too
        sizes = _measure(self._kernel)
        return sizes["dead"] >= NEEDED_SHARE * sizes["made"]

    def _ready(self, scenario: Scenario) -> TortureKernel:
        """Return a kernel with the imports, the tool and the objects that a scenario needs."""
        if self._kernel is None:
            variables = {"TORTURE_GPU": "1"} if self._gpu else {}
            self._kernel = TortureKernel(**variables)
        imports = [f"import {name}" for name in ("numpy", *scenario.needs) if name != "matplotlib"]
        for code in (_PRELUDE, "\n".join(imports), self._way.load, scenario.before):
            _ok(self._kernel, code)
        return self._kernel

    def _try(self, scenario: Scenario) -> Result:
        """Run the scenario in the scope, and return its result.

        Raises:
            AssertionError: a cell ended otherwise than the scenario says.
        """
        way = self._way
        kernel = self._ready(scenario)
        kernel.value(f"{_BLOCKS}.begin(get_ipython().user_ns)")
        before = _measure(kernel)
        _ok(kernel, way.start)
        cells = scenario.cells
        if self._gpu and scenario.on_gpu:
            cells = scenario.on_gpu
        for cell in cells:
            _run(kernel, replace(cell, code=way.first_line + cell.code))
        _ok(kernel, way.end)
        after = _measure(kernel)
        gpu_left = after["gpu"] - before["gpu"]
        result = Result(scenario, after["made"], after["dead"], after["on_gpu"], gpu_left)
        if way in OURS:
            holder = scenario.holder if result.is_met() else None
            result = replace(result, told=_reports(kernel, holder))
        return result


def _measure(kernel: Kernel) -> dict[str, int]:
    """Return the scenario's bytes; ``blocks.report`` says which."""
    sizes: dict[str, int] = kernel.value(f"{_BLOCKS}.report()")
    return sizes


def _reports(kernel: TortureKernel, holder: str | None) -> str:
    """Return the reports on memory that is held, up to the first with ``holder``, or all."""
    text = ""
    for question in _QUESTIONS:
        if holder is None or holder not in text:
            text += "\n".join(kernel.run(f"%gpumem {question}").reports())
    return text


def _ok(kernel: TortureKernel, code: str) -> None:
    """Run a cell that must succeed; an empty one is left out."""
    if code:
        _run(kernel, Cell(code))


def _run(kernel: TortureKernel, cell: Cell) -> None:
    """Run a cell that must end as the scenario says, without a warning of ipygpumem."""
    reply = kernel.run(cell.code, timeout=300, answers=cell.answers)
    while reply.status == "error" and kernel.run("", silent=True).status == "aborted":
        pass
    # IPython shows a group by its own means and sends no error; others show an error and succeed.
    is_as_expected = reply.status == "ok"
    if cell.raises:
        is_as_expected = reply.status == "error" and reply.error in (None, cell.raises)
    if not is_as_expected:
        raise AssertionError(
            f"{cell.code}\nended with {reply.status} {reply.error} {reply.message}\n{reply.stderr}"
        )
    if "ipygpumem:" in reply.stderr:
        raise AssertionError(reply.stderr)
