"""Checks that a kernel survives a cell that uses up its memory, with the guard and without it.

``python -m benchmarks.guard FILE`` runs cells in control groups of 1 GiB, and prints the tables of
docs/out-of-memory.md: how many runs of each cell ended well. It takes hours, so that results are
added to FILE; without ``--runs`` it only prints them. It needs Linux and the right to make control
groups.
"""

from __future__ import annotations

import argparse
import json
import queue
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.control_group import limited_group, move
from benchmarks.harness.kernel import Kernel, Reply, plain

_GROUP_BYTES = 1 << 30
_SECONDS = 120.0
_MODES = {"none": "", "guard": "%gpumem guard on", "touched": "%gpumem guard on --touched"}
_POOL = "import multiprocessing as mp\nwith mp.get_context('fork').Pool({n}) as pool: "

_FILL = {
    "a list of text": "rows = []\nwhile True: rows.append('x' * 1000 + str(len(rows)))",
    "a list of arrays": "import numpy\narrays = []\nwhile True: arrays.append(numpy.ones(2**20))",
    "`pandas.concat` in a loop": "import pandas, numpy\nframe = pandas.DataFrame({'a': numpy.arange(200_000), "  # noqa: E501
    "'b': numpy.random.rand(200_000)})\nwhile True: frame = pandas.concat([frame, frame.copy()])",
    "a list of torch layers on the CPU": "import torch\nlayers = []\n"
    "while True: layers.append(torch.nn.Linear(1000, 1000))",
    "a dict of objects": "class Point:\n    def __init__(self, x): self.x, self.name = x, str(x)\n"
    "points = {}\nwhile True: points[len(points)] = Point(len(points))",
    "a list of many small arrays": "import numpy\nsmall = []\nwhile True: small.append(numpy.arange(50))",  # noqa: E501
    "a text that grows by `join`": "text = 'abc' * 2**20\nwhile True: text = ''.join([text, text[:2**23]])",  # noqa: E501
    "a pool of two forked workers": "def load(n):\n    kept = []\n    for _ in range(2000): "
    "kept.append(bytearray(b'1') * 2**18)\n    return len(kept)\nmine = bytearray(b'1') * 2**27\n"
    + _POOL.format(n=2)
    + "pool.map(load, range(8))",
    "four threads": "from concurrent.futures import ThreadPoolExecutor\nparts = []\ndef work(n):\n    while True: "  # noqa: E501
    "parts.append(bytearray(b'1') * 2**16)\nwith ThreadPoolExecutor(4) as pool:\n"
    "    for future in [pool.submit(work, n) for n in range(4)]: future.result()",
}
"""Cells that use up any memory."""

_THREADS = """
import logging, threading
logging.basicConfig()
parts = []
def fill():
    while True: parts.append(bytearray(b'1') * 2**16)
def fill_with_text():
    while True: parts.append('x' * 400 + str(len(parts)))
def fill_and_print():
    try: fill()
    except MemoryError: print('full')
def fill_and_log():
    try: fill()
    except MemoryError: logging.exception('full')
def start(work, count):
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""
_FULL = """
import zmq
parts = []
try:
    while True: parts.append(b'1' * 2**10 + b'')
except MemoryError: pass
"""

_ENDS = {
    "a thread that dies": f"{_THREADS}start(fill, 1)",
    "4 threads that die": f"{_THREADS}start(fill, 4)",
    "40 threads that die": f"{_THREADS}start(fill, 40)",
    "40 threads that die of small objects": f"{_THREADS}start(fill_with_text, 40)",
    "4 threads that print": f"{_THREADS}start(fill_and_print, 4)",
    "40 threads that print": f"{_THREADS}start(fill_and_print, 40)",
    "40 threads that log": f"{_THREADS}start(fill_and_log, 40)",
    "40 new sockets": f"{_FULL}context = zmq.Context()\nsockets = [context.socket(zmq.PUSH) for _ in range(40)]",  # noqa: E501
    "900 messages to a socket": f"{_FULL}pull, push = [zmq.Context.instance().socket(kind) for kind in (zmq.PULL, "  # noqa: E501
    "zmq.PUSH)]\npull.bind('inproc://x'); push.connect('inproc://x'); push.set_hwm(0)\n"
    "for _ in range(900): push.send(b'1' * 100)\npull.close(); push.close()",
    "a deep recursion": "import sys\nsys.setrecursionlimit(10**5)\ndef f(n):\n    numbers = list(range(2000))\n"  # noqa: E501
    "    return f(n + 1) + len(numbers)\nf(0)",
    "a dict that doubles": "numbers = {}\nwhile True: numbers[len(numbers)] = None",
    "`repr` of lists": "text = repr([list(range(1000))] * 200_000)",
    "three attempts": "rows = []\nfor n in range(3):\n    try:\n        while True: rows.append(bytes([n]) * 2**16)\n"  # noqa: E501
    "    except MemoryError:\n        if n == 2: raise",
}
"""Cells that use up any memory in ways that have ended kernels; some end without an error."""

_HARMLESS = {
    "an array of 4 GiB that is not filled": "import numpy\na = numpy.zeros(2**29); a[:1000] = 1; del a",  # noqa: E501
    "a private memory map of a file of 4 GiB": "import numpy, tempfile\nf = tempfile.NamedTemporaryFile()\n"  # noqa: E501
    "f.truncate(2**32)\nm = numpy.memmap(f.name, 'u1', 'c'); m[:1000].sum(); del m",
    "a shared memory map of a file of 4 GiB": "import numpy, tempfile\nf = tempfile.NamedTemporaryFile()\n"  # noqa: E501
    "f.truncate(2**32)\nm = numpy.memmap(f.name, 'u1', 'r+'); m[:1000].sum(); del m",
    "128 waiting threads": "import threading\ne = threading.Event()\n"
    "ts = [threading.Thread(target=e.wait) for _ in range(128)]\n"
    "try: [t.start() for t in ts]\nfinally: e.set()\n[t.join() for t in ts]",
    "a pool of 32 threads": "from concurrent.futures import ThreadPoolExecutor\n"
    "with ThreadPoolExecutor(32) as p: r = list(p.map(lambda n: len(bytes(n)), [2**20] * 200))",
    "a pool of 4 processes": _POOL.format(n=4) + "assert pool.map(abs, range(100))[9] == 9",
    "a child with 4 GiB": "import subprocess, sys\n"
    "subprocess.run([sys.executable, '-c', 'import numpy; numpy.zeros(2**29)'], check=True)",
    "a shell command": "import os\nassert os.system('python3 -c \"x = bytearray(2**28)\"') == 0",
    "an array of 300 MiB, ten times": "import numpy\nfor _ in range(10): numpy.ones(300 * 2**17)",
    "an array of 700 MiB": "import numpy\na = numpy.ones(700 * 2**17); del a",
    "pandas": "import pandas, numpy\nf = pandas.DataFrame({'k': numpy.arange(10**6) % 100, "
    "'v': numpy.random.rand(10**6)})\ng = f.groupby('k').v.mean(); del f",
    "training with torch": "import torch\nm = torch.nn.Linear(500, 500); o = torch.optim.Adam(m.parameters())\n"  # noqa: E501
    "for _ in range(20): m(torch.randn(64, 500)).sum().backward(); o.step()",
    "a `DataLoader`": "import torch\nd = torch.utils.data.DataLoader(torch.utils.data.TensorDataset("  # noqa: E501
    "torch.randn(2000, 10)), 32, num_workers=2)\nassert sum(1 for _ in d) == 63",
    "a product of matrices": "import numpy\na = numpy.random.rand(2000, 2000); b = a @ a; del a, b",
    "sorting": "import random\nx = sorted(random.random() for _ in range(2 * 10**6)); del x",
    "SQLite": "import sqlite3\nc = sqlite3.connect(':memory:'); c.execute('create table t(a, b)')\n"
    "c.executemany('insert into t values (?, ?)', ((n, 'x' * 50) for n in range(300_000))); c.close()",  # noqa: E501
    "reading a file of 1 GiB": "import tempfile\nwith tempfile.TemporaryFile() as f:\n"
    "    for _ in range(64): f.write(b'1' * 2**24)\n    f.seek(0)\n    while f.read(2**24): pass",
    "compressing 100 MiB": "import zlib, os\nz = zlib.compress(os.urandom(2**20) * 100, 1); del z",
    "JSON": "import json\ns = json.dumps([{'a': n, 'b': 'x' * 20} for n in range(500_000)])\n"
    "x = json.loads(s); del s, x",
    "scikit-learn": "from sklearn.ensemble import RandomForestClassifier\nimport numpy\n"
    "RandomForestClassifier(20, n_jobs=2).fit(numpy.random.rand(5000, 10), numpy.arange(5000) % 3)",
}
"""Programs that fit."""


class _Kernel(Kernel):
    """A kernel that may be killed while a cell runs."""

    def _take(self, message_id: str, outputs: Reply) -> bool:
        if not self._manager.is_alive():
            raise TimeoutError("killed")
        return super()._take(message_id, outputs)

    def reply_to(self, code: str) -> Reply | None:
        """Return the reply to a cell; None if the kernel was killed or hangs."""
        try:
            reply = self.run(code, timeout=_SECONDS)
            while reply.status == "aborted":  # it was sent before the last cell's error was known
                reply = self.run(code, timeout=_SECONDS)
        except (TimeoutError, queue.Empty):
            return None
        return reply


def _tried(cell: str, mode: str, *, harmless: bool, may_succeed: bool) -> dict[str, str | bool]:
    """Run a cell in a fresh kernel; return True as ``well`` if it ended as it should and the kernel
    works after it, and the name of its error as ``error``.

    Args:
        cell: the code.
        mode: a key of ``_MODES``.
        harmless: True if the cell must succeed.
        may_succeed: True if it need not end with an error, which must be shown.
    """
    with limited_group(_GROUP_BYTES) as group, _Kernel() as kernel:
        move(int(kernel.value("__import__('os').getpid()")), group)
        kernel.run("%load_ext ipygpumem")
        kernel.run(_MODES[mode])
        kernel.run("first = list(range(1000)); second = {'a': 1}")
        reply = kernel.reply_to(cell)
        if reply is None:
            end = "hung" if kernel._manager.is_alive() else "killed"
            return {"well": False, "error": end}
        if harmless:
            return {"well": reply.status == "ok", "error": reply.error or ""}
        following = kernel.reply_to("print(len(first), second, len(bytearray(2**20)))")
        works = following is not None and following.stdout.strip() == "1000 {'a': 1} 1048576"
        ended_as_expected = may_succeed
        if reply.error:
            ended_as_expected = reply.error in plain(reply.traceback)
        return {"well": works and ended_as_expected, "error": reply.error or ""}


def _print_table(results: Sequence[dict[str, str | bool]], cells: dict[str, str]) -> None:
    """Print a row for each cell: in each mode, the number of runs that ended well, and the errors
    of the rest.
    """
    for name in cells:
        row = [name]
        for mode in _MODES:
            runs = [
                result for result in results if (result["cell"], result["mode"]) == (name, mode)
            ]
            good_runs = sum(bool(result["well"]) for result in runs)
            errors = Counter[str]()
            for result in runs:
                if not result["well"] or cells is _HARMLESS:
                    errors[str(result["error"])] += 1
            row.append(f"{good_runs} of {len(runs)} {dict(errors)}")
        print("|", " | ".join(row), "|")


def main() -> None:
    """Run the cells and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--modes", nargs="+", choices=_MODES, default=list(_MODES))
    parser.add_argument("--harmless", action="store_true", help="run the harmless programs only")
    parser.add_argument(
        "--ends", action="store_true", help="run the cells that have ended kernels only"
    )
    options = parser.parse_args()
    cells = _FILL
    if options.harmless:
        cells = _HARMLESS
    elif options.ends:
        cells = _ENDS
    for _ in range(options.runs):
        for name in cells:
            for mode in options.modes:
                outcome = _tried(
                    cells[name], mode, harmless=options.harmless, may_succeed=options.ends
                )
                result = {"cell": name, "mode": mode, **outcome}
                with options.file.open("a") as file:
                    file.write(json.dumps(result) + "\n")
    results = [json.loads(line) for line in options.file.read_text().splitlines()]
    _print_table(results, _FILL)
    _print_table(results, _ENDS)
    _print_table(results, _HARMLESS)


if __name__ == "__main__":
    main()
