"""Makes the picture of docs/host-memory.md: ``python examples/host_memory.py docs/img``.

Its figures are measured: the process really holds text, an array, a frame, shared memory, free
pages and a child.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ipygpumem.extras.pictures import plot
from ipygpumem.inventory.devices import findings
from ipygpumem.meter.meter import Meter
from ipygpumem.probes.host import HostProbe
from ipygpumem.probes.outside import OutsideProbe

CHILD = "import sys; held = bytes(range(256)) * (int(sys.argv[1]) << 12); input()"


def picture(mib: int) -> Figure:
    """Return a bar of this process's memory; each kind of object has about ``mib`` MiB."""
    log = [f"request {number} took {number % 97} ms" for number in range(mib * 6000)]
    slow = log[::100]  # keeps Python from returning the arenas of the text
    notes = [f"note number {number}" for number in range(mib * 12_000)]
    frame = pd.DataFrame({"text": notes}).astype("string[pyarrow]")
    values = np.ones(mib << 17)
    rows = [bytes(1000) for _ in range(mib * 1000)]
    last = bytes(2000)  # keeps malloc from returning the rows' pages
    file = os.memfd_create("batch")
    os.truncate(file, mib << 20)
    batch = mmap.mmap(file, mib << 20)
    batch[:] = bytes(mib << 20)
    del rows, log
    meter = Meter([HostProbe(), OutsideProbe()])
    with subprocess.Popen([sys.executable, "-c", CHILD, str(mib)], stdin=subprocess.PIPE) as child:
        ram = findings.now(meter).reconciliations[0]
        child.communicate(b"\n")
    meter.close()
    os.close(file)
    del values, frame, notes, last, slow, batch
    names = [part.name for part in ram.parts]
    own = ram.parts[: names.index("child processes") + 1]
    total = sum(part.size_bytes or 0 for part in own)
    return plot.devices(
        [replace(ram, parts=own, total_bytes=total, basis="a process and its child")]
    )


if __name__ == "__main__":
    picture(64).savefig(
        Path(sys.argv[1]) / "plot-host.png", dpi=150, metadata={"Software": "ipygpumem"}
    )
