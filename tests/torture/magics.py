"""Scenarios: IPython's magics and debugger, and warnings, with NumPy arrays."""

from __future__ import annotations

from tests.torture.scenario import Cell, Scenario, cells, fails

_SCRIPT = """
import os, tempfile
path = os.path.join(tempfile.mkdtemp(), "script.py")
with open(path, "w") as file:
    """

MAGICS = (
    Scenario(
        "%%capture",
        "The captured outputs keep what was displayed.",
        "The end of the experiment deletes the captured object.",
        cells("%%capture out\nx = array()\ndisplay(x[:3])\nx"),
    ),
    Scenario(
        "%%capture of a cell that fails",
        "The error is captured and not shown, and its frames are kept all the same.",
        "The end of the experiment releases the frames.",
        cells("%%capture out\ndef f():\n    x = array()\n    raise ValueError\nf()"),
    ),
    Scenario(
        "%prun",
        "The profile that `%prun -r` returns refers to code only, but what it ran has left its error.",
        "The end of the experiment releases the frames.",
        (fails("def f():\n    x = array()\n    raise ValueError\n%prun f()"),),
    ),
    Scenario(
        "completion and help",
        "Tab completion and `?` look into objects and cache what they have found.",
        "The end of the experiment deletes the names; the caches keep no objects.",
        cells(
            """
import warnings
warnings.simplefilter("ignore")
class Model:
    def __init__(self): self.data = array()
model, box = Model(), {"key": array()}
""",
            """
get_ipython().complete("model."), get_ipython().complete("box[")
list(get_ipython().Completer.completions("model.data.s", 12))
None
""",
            "model?",
            "model.data?",
        ),
    ),
    Scenario(
        "%%time",
        "`%%time` runs its cell in the notebook, whose last value is an output.",
        "The end of the experiment deletes names and outputs as ever.",
        cells("%%time\nx = array()\nx + 1\nx"),
    ),
    Scenario(
        "%run",
        "`%run` leaves the script's names in the notebook.",
        "The end of the experiment deletes them.",
        cells("%run $path"),
        before=_SCRIPT
        + 'file.write("from tests.torture.blocks import array\\ndata = array()\\ndef f(): return data\\n")',
    ),
    Scenario(
        "%run for the second time",
        "IPython keeps the namespace of the last run of each script.",
        "The end of the experiment drops it.",
        cells("%run $path"),
        before=_SCRIPT + 'file.write("from tests.torture.blocks import array\\ndata = array()")\n%run $path\ndel data',
    ),
    Scenario(
        "%run of a script that fails",
        "The script's error keeps its frames, and IPython the script's namespace.",
        "The end of the experiment releases the frames.",
        cells("%run $path"),
        before=_SCRIPT
        + """file.write(
        "from tests.torture.blocks import array\\n"
        "data = array()\\ndef f():\\n    x = array()\\n    1 / 0\\nf()\\n"
    )
""",
    ),
    Scenario(
        "%run -i of a script that fails",
        "The script's error keeps the frames of its functions.",
        "The end of the experiment releases the frames.",
        cells("%run -i $path"),
        before=_SCRIPT
        + """file.write("data = array()\\ndef f():\\n    x = array()\\n    1 / 0\\nf()\\n")
""",
    ),
    Scenario(
        "%store",
        "`%store` writes to a file, and IPython's database keeps the object in memory as well.",
        "The end of the experiment empties that memory; the file stays.",
        cells("x = array()\n%store x"),
    ),
    Scenario(
        "warning registries",
        "The notebook's `__warningregistry__` keeps the category of a warning until the next cell.",
        "The end of the experiment drops it at once.",
        cells(
            """
import warnings
class Careful(UserWarning):
    data = array()
warnings.warn("careful", Careful)
"""
        ),
    ),
    Scenario(
        "recorded warnings",
        "A recorded warning keeps its message object and its source.",
        "The end of the experiment deletes the record.",
        cells(
            """
import warnings
class Careful(UserWarning): pass
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    warning = Careful("careful"); warning.data = array()
    warnings.warn(warning, source=array())
"""
        ),
    ),
    Scenario(
        "%debug",
        "The debugger keeps the frames that it has shown, and their locals.",
        "The end of the experiment makes it forget them.",
        (
            fails("def f():\n    x = array()\n    raise ValueError\ndef g():\n    y = array()\n    f()\ng()"),
            Cell("%debug", answers=("display x", "up", "display y", "p locals()", "q")),
        ),
    ),
    Scenario(
        "%debug in a closure",
        "The debugger keeps the frame, the frame its function, the function what it closes over.",
        "The end of the experiment makes it forget them.",
        (
            fails("def f():\n    x = array()\n    def g():\n        x.sum()\n        raise ValueError\n    g()\nf()"),
            Cell("%debug", answers=("x.sum()", "up", "z = x", "!w = x", "up", "q")),
        ),
    ),
    Scenario(
        "%tb",
        "`%tb` reads the locals of every frame again.",
        "The end of the experiment releases the frames.",
        (
            fails("def f():\n    x = array()\n    raise ValueError\ndef g():\n    y = array()\n    f()\ng()"),
            *cells("%tb", "%tb Verbose"),
        ),
    ),
    Scenario(
        "%pdb",
        "With `%pdb on` each error opens the debugger, which keeps the frames.",
        "The end of the experiment makes it forget them.",
        (
            Cell("%pdb on"),
            Cell(
                "def f():\n    x = array()\n    raise ValueError\nf()",
                raises="ValueError",
                answers=("x.sum()", "up", "q"),
            ),
            Cell("%pdb off"),
        ),
    ),
)
