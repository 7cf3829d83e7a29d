"""Scenarios: errors that are raised or kept elsewhere: in threads, tasks, log records and finalisers."""

from __future__ import annotations

from tests.torture.errors import RELEASED
from tests.torture.scenario import Scenario, cells, fails

TASKS = (
    Scenario(
        "an error in a thread",
        "The thread's error is shown by `threading.excepthook`, with all its frames.",
        "The end of the experiment gives it back; nothing keeps the error longer.",
        cells(
            """
import threading
def f():
    x = array()
    raise ValueError
thread = threading.Thread(target=f); thread.start(); thread.join()
"""
        ),
    ),
    Scenario(
        "an error in a pool of threads",
        "The future keeps the error, the error the frames.",
        "The end of the experiment deletes the future.",
        cells(
            """
from concurrent.futures import ThreadPoolExecutor
def f(data):
    x = array()
    raise ValueError
pool = ThreadPoolExecutor(1)
future = pool.submit(f, array())
try: future.result()
except ValueError: pass
"""
        ),
    ),
    Scenario(
        "an error in an asyncio task",
        "A task keeps its error until somebody has asked for it.",
        "The end of the experiment deletes the task.",
        cells(
            """
import asyncio
async def f(ask):
    x = array()
    await asyncio.sleep(0)
    raise ValueError
asked, forgotten = asyncio.create_task(f(True)), asyncio.create_task(f(False))
await asyncio.wait([asked, forgotten])
asked.exception()
None
"""
        ),
    ),
    Scenario(
        "an error in an awaited task",
        "The error passes through the task and the cell, and keeps the frames of both.",
        RELEASED,
        (
            fails(
                """
import asyncio
async def f():
    x = array()
    await asyncio.sleep(0)
    raise ValueError
await asyncio.gather(f(), asyncio.sleep(0))
"""
            ),
        ),
    ),
    Scenario(
        "a task that waits for ever",
        "The event loop keeps a task that sleeps, and the task its frame.",
        "Held on purpose: `cancel()` the task.",
        cells(
            "import asyncio\nasync def f():\n    x = array()\n    await asyncio.sleep(3600)\n"
            "task = asyncio.create_task(f())\nawait asyncio.sleep(0)"
        ),
        share=0.0,
        holder="task",
        alone=True,
    ),
    Scenario(
        "logging.exception",
        "A record keeps the error, the error its frames; the handler of last resort keeps no record.",
        "The end of the experiment gives it back.",
        cells(
            """
import logging
def f():
    x = array()
    raise ValueError
try: f()
except ValueError: logging.getLogger("torture").exception("failed")
"""
        ),
    ),
    Scenario(
        "a handler that keeps its records",
        "A `MemoryHandler` on a logger keeps the records, and they their errors with all frames.",
        "Held on purpose: `flush()` or remove the handler.",
        cells(
            """
def f():
    x = array()
    raise ValueError
try: f()
except ValueError: logging.getLogger("torture").exception("failed")
"""
        ),
        before="import logging, logging.handlers\nhandler = logging.handlers.MemoryHandler(100, flushLevel=100)\n"
        "logging.getLogger('torture').addHandler(handler)",
        share=0.0,
        holder="handler",
        alone=True,
    ),
    Scenario(
        "unraisable errors",
        "An error in `__del__` cannot be raised; `sys.unraisablehook` shows it.",
        "The end of the experiment gives it back.",
        cells(
            """
class Fails:
    def __init__(self): self.data = array()
    def __del__(self):
        x = array()
        raise ValueError
thing = Fails()
del thing
"""
        ),
    ),
    Scenario(
        "an error in an event callback",
        "IPython shows the error of a callback that runs between two cells, and stores it as the last one.",
        RELEASED,
        cells(
            """
def callback(*args):
    x = array()
    raise ValueError
get_ipython().events.register("post_run_cell", callback)
""",
            "1",
            "get_ipython().events.unregister('post_run_cell', callback)",
        ),
    ),
    Scenario(
        "an error in a repr",
        "The error of a representation is shown and stored like any other.",
        RELEASED,
        (
            fails(
                """
class Fails:
    def __init__(self): self.data = array()
    def _repr_html_(self):
        x = array()
        raise ValueError
Fails()
"""
            ),
        ),
    ),
    Scenario(
        "tasks beside one that fails",
        "`asyncio.gather` raises the first error while the other tasks go on with their frames.",
        RELEASED,
        (
            fails(
                """
import asyncio
async def work(number):
    x = array()
    await asyncio.sleep(0)
    if number == 1:
        raise ValueError
await asyncio.gather(*map(work, range(3)))
"""
            ),
            *cells("await asyncio.sleep(0.05)"),
        ),
    ),
    Scenario(
        "sys.exit",
        "`sys.exit()` is an error as well, and its traceback keeps the frames.",
        RELEASED,
        (fails("import sys\ndef f():\n    x = array()\n    sys.exit(1)\nf()", "SystemExit"),),
    ),
)
