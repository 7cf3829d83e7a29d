"""A tutorial of examples/ that was run in a real kernel: what its cells gave, and the records of what they cost."""

from __future__ import annotations

import re
from pathlib import Path

from ipygpumem.model import CellRecord, ExperimentRecord, TraceRecord, Usage
from ipygpumem.units import MIB, parse_bytes
from tests.kernel import Kernel, Reply
from tests.notebooks import read

EXAMPLES = Path(__file__).parent.parent / "examples"


class Tutorial:
    """One tutorial, run from top to bottom; a cell fails if it is tagged so, and no other does.

    Figures are in MiB, and those of the device that the tutorial works on: the GPU if there is one, else RAM.
    """

    def __init__(self, name: str) -> None:
        self.replies: dict[str, Reply] = {}
        with Kernel() as kernel:
            for cell in read(EXAMPLES / f"{name}.ipynb").cells:
                if cell.cell_type == "code":
                    reply = self.replies[cell.id] = kernel.run(cell.source)
                    fails = "raises-exception" in cell.metadata.get("tags", ())
                    assert (reply.status == "error") is fails, (cell.source, reply.traceback)
            kernel.run("def plain(records):\n    return [record.to_dict() for record in records]", silent=True)
            cells, experiments, traces = (
                kernel.value(f"plain(ipygpumem.{kind}())") for kind in ("history", "experiments", "traces")
            )
        self._records = {record["execution_count"]: CellRecord.from_dict(record) for record in cells}
        self.experiments = {record["name"]: ExperimentRecord.from_dict(record) for record in experiments}
        self.traces = [TraceRecord.from_dict(record) for record in traces]

    def text(self, cell: str) -> str:
        """Return all reports of a cell."""
        return "\n".join(self.replies[cell].reports())

    def pictures(self, cell: str) -> int:
        """Return how many pictures a cell shows."""
        return sum("image/png" in display["data"] for display in self.replies[cell].displays)

    def number(self, cell: str) -> int:
        """Return the number in a cell's ``In [n]``."""
        return list(self.replies).index(cell) + 1

    def usages(self, cell: str) -> tuple[Usage, ...]:
        """Return what a cell cost on each device, RAM first."""
        return self._records[self.number(cell)].usages

    def kept(self, cell: str) -> float:
        return self.usages(cell)[-1].delta_bytes / MIB

    def peak(self, cell: str) -> float:
        return self.usages(cell)[-1].peak_delta_bytes / MIB

    @property
    def device(self) -> str:
        """What reports call the device."""
        device = list(self._records.values())[-1].usages[-1].device
        return "RAM" if device == "cpu" else device

    def trace(self, label: str) -> float:
        """Return what the only trace of this label kept."""
        (found,) = [trace for trace in self.traces if trace.label == label]
        return found.usages[-1].delta_bytes / MIB

    def statements(self, cell: str) -> list[tuple[float, float]]:
        """Return what each statement of a ``%%gpumemit`` kept, and its peak."""
        rows = self.text(cell).partition("\n  noise:")[0].splitlines()
        parts = [row.partition(f"   {self.device} ")[2] for row in rows]
        return [(sizes[0], sizes[1]) for sizes in map(_signed, parts) if len(sizes) == 2]

    def lines(self, cell: str) -> list[tuple[float, float]]:
        """Return what each line of a ``%%memlines`` that ran kept, and its peak."""
        rows = re.findall(r"^ +\d+ +\d+ +[\d.]+ \ws? (.*)", self.text(cell), re.MULTILINE)
        return [(sizes[-2], sizes[-1]) for sizes in map(_signed, rows)]

    def parts(self, cell: str) -> dict[str, float]:
        """Return the parts of the device's memory in a ``%gpumem status``, with the total under an empty name."""
        _, name, *tables = re.split(r"^  (\S+): (?=[\d.]+ [KMG]iB, )", self.text(cell), flags=re.MULTILINE)
        table = dict(zip([name, *tables[1::2]], tables[::2], strict=True))[self.device]
        rows = re.findall(r"^ +([\d.]+ (?:[KMG]i)?B)   (\S.*?)   ", table, re.MULTILINE)
        total = table.partition(",")[0]
        return {name: parse_bytes(size) / MIB for size, name in [(total, ""), *rows]}


def _signed(text: str) -> list[float]:
    found = re.findall(r"([+-])(\d[\d.]*(?: (?:[KMG]i)?B)?)(?= |$)", text)
    return [float(f"{sign}{parse_bytes(size)}") / MIB for sign, size in found]
