"""Objects whose methods raise: none is called, and finalisers stop nothing."""

from __future__ import annotations

from tests.bad_input.steps import goes_on, names, open_now, run, works
from tests.kernel import Kernel

HOSTILE = '''
import sys
touched = []

def touch(what):
    """Record a call that came through ipygpumem, and raise; other callers (IPython) just get the error."""
    frame = sys._getframe(2)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("ipygpumem"):
            touched.append(what)
            break
        frame = frame.f_back
    raise RuntimeError("hands off")

def trap(name):
    def method(*args, **kwargs):
        touch(name)
    return method

NAMES = """__repr__ __str__ __eq__ __ne__ __hash__ __bool__ __len__ __iter__ __getattr__ __getattribute__ __format__
__sizeof__ __reduce__ __reduce_ex__ __dir__ __contains__ __getitem__ __call__ __index__ __int__ __lt__ __array__
__enter__ __instancecheck__ __subclasscheck__ __setattr__ __delattr__ __array_interface__ __torch_function__
__iter__ __next__ __missing__ __copy__ __deepcopy__ __get__""".split()
body = {name: trap(name) for name in NAMES}
hostile_class = property(trap("__class__"))

class Meta(type):
    __name__ = property(trap("type.__name__"))
    __module__ = property(trap("type.__module__"))
    __repr__ = trap("type.__repr__"); __eq__ = trap("type.__eq__"); __hash__ = trap("type.__hash__")
    __bool__ = trap("type.__bool__"); __len__ = trap("type.__len__"); __iter__ = trap("type.__iter__")
    __instancecheck__ = trap("__instancecheck__"); __subclasscheck__ = trap("__subclasscheck__")
    __getattribute__ = trap("type.__getattribute__")

Hostile = Meta("Hostile", (), dict(body, __class__=hostile_class))
Container = Meta("Container", (dict,), dict(body, __class__=hostile_class))
Sequence = Meta("Sequence", (list,), dict(body, __class__=hostile_class))
Function = type("Function", (), {"__call__": trap("__call__"), "__getattribute__": trap("__getattribute__")})
'''


def test_no_method_of_a_users_object_is_called_at_exit_in_status_or_in_reports(notebook: Kernel) -> None:
    works(notebook, HOSTILE)
    works(notebook, "import numpy as np\nold = object.__new__(Hostile)")
    works(notebook, "%experiment start a --keep kept")
    works(
        notebook,
        "a = object.__new__(Hostile)\n"
        "b = dict.__new__(Container); dict.__setitem__(b, 'k', np.ones(1 << 19))\n"
        "c = list.__new__(Sequence); list.append(c, a)\n"
        "old = object.__new__(Hostile)\n"
        "kept = object.__new__(Hostile)\n"
        "d = [a, {'x': (a, b)}, Function()]\n"
        "Array = type('Array', (np.ndarray,), body)\n"
        "e = np.ndarray.__new__(Array, 1 << 19)\n"
        "f = Hostile",
    )
    works(notebook, "%experiment status")
    works(notebook, "%gpumem status")
    reply = works(notebook, "%experiment end")
    assert "deleted: " in reply.reports("experiment")[0]
    assert notebook.value("touched") == []
    assert not {"a", "b", "c", "d", "e", "f"} & set(names(notebook))
    assert notebook.value("type.__subclasscheck__(Hostile, type(old))") is True
    goes_on(notebook)


def test_no_method_of_a_users_object_is_called_after_an_oom(notebook: Kernel) -> None:
    works(notebook, HOSTILE)
    works(notebook, "import numpy as np\nold = object.__new__(Hostile)")
    works(
        notebook,
        "class Oom(MemoryError):\n"
        "    __str__ = trap('__str__'); __repr__ = trap('__repr__'); __eq__ = trap('__eq__')\n"
        "    __bool__ = trap('__bool__')\n"
        "    __len__ = trap('__len__'); args = property(trap('args')); __hash__ = trap('__hash__')\n"
        "    __getattribute__ = trap('__getattribute__')\n"
        "def fail():\n"
        "    Array = type('Array', (np.ndarray,), body)\n"
        "    array = np.ndarray.__new__(Array, 1 << 20)\n"
        "    thing = object.__new__(Hostile); box = dict.__new__(Container); row = list.__new__(Sequence)\n"
        "    list.append(row, thing); error = Oom((1, 2), thing)\n"
        "    BaseException.__setattr__(error, 'thing', thing)\n"
        "    raise error",
    )
    reply = run(notebook, "fail()")
    assert reply.status == "error"
    (text,) = reply.reports("recovery")
    assert "array" in text
    assert "Array" in text
    assert notebook.value("touched") == []
    goes_on(notebook)


def test_finalisers_that_raise_or_replace_names_do_not_stop_an_exit(notebook: Kernel) -> None:
    works(
        notebook,
        "class Raises:\n    def __del__(self): raise ValueError('from __del__')\n"
        "class Exits:\n    def __del__(self): raise SystemExit(4)\n"
        "class Deletes:\n    def __del__(self): globals().pop('zz', None); globals().pop('old2', None)\n"
        "class Adds:\n    def __del__(self): globals()['late'] = 1\n"
        "old, old2 = 'old', 'old2'",
    )
    works(notebook, "%experiment start a")
    works(notebook, "a, b, c, d = Raises(), Exits(), Deletes(), Adds()\nzz = 1\nold = 'new'")
    notebook.run("%experiment end")
    assert "no experiment is open" in open_now(notebook)
    assert notebook.value("old") == "old"
    assert not {"a", "b", "c", "d", "zz"} & set(names(notebook))
    goes_on(notebook)


def test_a_cycle_whose_finaliser_makes_new_garbage_does_not_keep_an_exit_busy(notebook: Kernel) -> None:
    works(
        notebook,
        "class Phoenix:\n    def __init__(self): self.me = self\n    def __del__(self): Phoenix()\nimport gc",
    )
    works(notebook, "%%experiment a\np = Phoenix()", timeout=30)
    works(notebook, "del Phoenix.__del__\ngc.collect()")
    goes_on(notebook)
