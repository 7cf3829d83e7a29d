"""Scenarios: errors, whose tracebacks keep the frames and so the locals, with NumPy arrays."""

from __future__ import annotations

from tests.torture.scenario import Scenario, cells, fails

_PINS = "The traceback keeps the frames of the functions, and the frames keep their locals."
RELEASED = "The end of the experiment releases the frames; the traceback can still be shown."

_MODES = tuple(
    Scenario(
        f"%xmode {mode}",
        f"IPython's {mode} tracebacks read the frames' locals, which up to Python 3.12 makes a copy of them.",
        RELEASED,
        (fails("def f(a):\n    x = array()\n    raise ValueError\ndef g():\n    y = array()\n    f(y)\ng()"),),
        before=f"%xmode {mode}",
    )
    for mode in ("Plain", "Context", "Verbose", "Minimal")
)

ERRORS = (
    Scenario(
        "an error in a function",
        _PINS,
        RELEASED,
        (fails("def f():\n    x = array()\n    raise ValueError\ndef g():\n    y = array()\n    f()\ng()"),),
    ),
    Scenario(
        "raise from",
        "An error keeps its cause, and the cause its own frames.",
        RELEASED,
        (
            fails(
                """
def f():
    x = array()
    raise KeyError
def g():
    y = array()
    try:
        f()
    except KeyError as error:
        raise ValueError from error
g()
"""
            ),
        ),
    ),
    Scenario(
        "an error while handling another",
        "An error keeps the one that was being handled, also with `from None`.",
        RELEASED,
        (
            fails(
                """
def f():
    x = array()
    raise KeyError
def g():
    try:
        f()
    except KeyError:
        y = array()
        {}["missing"]
def h():
    try:
        g()
    except KeyError:
        raise ValueError from None
h()
"""
            ),
        ),
    ),
    Scenario(
        "an ExceptionGroup",
        "A group keeps its members, and each member its own frames.",
        RELEASED,
        (
            fails(
                """
def f():
    x = array()
    raise KeyError
def g():
    errors = []
    for _ in range(2):
        try:
            f()
        except KeyError as error:
            errors.append(error)
    raise ExceptionGroup("two", [*errors, ExceptionGroup("more", errors)])
g()
""",
                "ExceptionGroup",
            ),
        ),
        python=(3, 11),
    ),
    Scenario(
        "an error in a suspended generator",
        "The traceback keeps the frame that drives the generator, and so the generator.",
        RELEASED,
        (
            fails(
                """
def numbers():
    data = array()
    try:
        yield 1
        yield 2
    finally:
        data = None
def inner():
    for number in numbers():
        raise ValueError
def outer():
    more = array()
    yield from inner() or ()
next(outer())
"""
            ),
        ),
    ),
    Scenario(
        "an error in a with body",
        "The context manager's generator and the frames around it are in the traceback.",
        RELEASED,
        (
            fails(
                """
import contextlib
@contextlib.contextmanager
def session():
    data = array()
    yield data
def f():
    with session() as data, contextlib.ExitStack() as stack:
        stack.callback(lambda data: None, array())
        more = array()
        raise ValueError
f()
"""
            ),
        ),
    ),
    *_MODES,
    Scenario(
        "locals read by hand",
        "Whoever reads `frame.f_locals` makes the frame keep a copy of each local up to Python 3.12.",
        RELEASED,
        (
            fails("def f():\n    x = array()\n    raise ValueError\nf()"),
            *cells(
                """
import sys
tb = sys.last_value.__traceback__
while tb.tb_next: tb = tb.tb_next
found = dict(tb.tb_frame.f_locals)
"""
            ),
        ),
    ),
    Scenario(
        "two errors one after the other",
        "Each error replaces the one before, unless something kept that.",
        RELEASED,
        (
            fails("def f():\n    x = array()\n    raise ValueError\nf()"),
            fails("import sys\ndef g():\n    y = array()\n    raise KeyError from sys.last_value\ng()", "KeyError"),
        ),
    ),
    Scenario(
        "an error shown by hand",
        "`showtraceback()` stores the error as the last one, although the cell succeeds.",
        RELEASED,
        cells(
            "def f():\n    x = array()\n    raise ValueError\ntry:\n    f()\nexcept ValueError:\n"
            "    get_ipython().showtraceback()"
        ),
    ),
    Scenario(
        "a cell that ends well after an error",
        "The last error stays stored however many cells follow.",
        RELEASED,
        (fails("def f():\n    x = array()\n    raise ValueError\nf()"), *cells("1 + 1", "x = 2")),
    ),
    Scenario(
        "an interrupt",
        "Ctrl-C is an error as well: its traceback keeps the loop's frames.",
        "The frames are released as soon as the traceback was shown.",
        (
            fails(
                """
import signal
def train():
    data = array()
    for step in range(10):
        batch = array(16)
        if step == 2:
            signal.raise_signal(signal.SIGINT)
train()
""",
                "KeyboardInterrupt",
            ),
        ),
    ),
    Scenario(
        "MemoryError",
        "The traceback keeps all that was made before memory ran out.",
        "The frames are released as soon as the traceback was shown.",
        (fails("def f():\n    x = array()\n    y = numpy.ones(1 << 50)\nf()", "MemoryError"),),
    ),
    Scenario(
        "caught errors in a list",
        "A caught error keeps the frames below the one that caught it.",
        "The end of the experiment deletes the list and collects.",
        cells(
            """
def f():
    x = array()
    raise ValueError
errors = []
for _i_ in range(2):
    try: f()
    except ValueError as error: errors.append(error)
"""
        ),
    ),
    Scenario(
        "caught errors in an outer list",
        "The list outlives the scope, its errors keep their frames.",
        "Held on purpose: append `str(error)`, or call `traceback.clear_frames`.",
        cells(
            "def f():\n    x = array()\n    raise ValueError\ntry: f()\n"
            "except ValueError as error: errors.append(error)"
        ),
        before="errors = []",
        share=0.0,
        holder="errors",
    ),
    Scenario(
        "AttributeError.obj",
        "An `AttributeError` keeps the object that lacks the attribute.",
        RELEASED,
        (fails("class Model:\n    def __init__(self): self.data = array()\nModel().missing", "AttributeError"),),
    ),
    Scenario(
        "an error's arguments and attributes",
        "An error keeps what it was made with.",
        RELEASED,
        (
            fails(
                """
class Failed(ValueError): pass
error = Failed("no", array(), [array()])
error.batch = array()
error.add_note("a note") if hasattr(error, "add_note") else None
raise error
""",
                "Failed",
            ),
        ),
    ),
    Scenario(
        "an error in a class body",
        "The traceback keeps the names of the class that was never made.",
        RELEASED,
        (fails("class Model:\n    data = array()\n    raise ValueError"),),
    ),
    Scenario(
        "an error in exec",
        "The traceback keeps the namespace in which the code ran.",
        RELEASED,
        (fails("exec('x = array()\\nraise ValueError', {'array': array})"),),
    ),
    Scenario(
        "an error in a closure",
        "A frame keeps its function from Python 3.11 on, and that what it closes over.",
        RELEASED,
        (
            fails(
                "def f():\n    x = array()\n    def step():\n        x.sum()\n        raise ValueError\n    step()\nf()"
            ),
        ),
    ),
)
