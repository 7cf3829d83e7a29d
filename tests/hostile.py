"""Objects of which ipygpumem may call nothing. The tests' process imports them; a kernel runs this
file: ``SOURCE``.
"""

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

touched: list[str] = []
"""Methods that ipygpumem has called. Only this tells: an error alone could be one that ipygpumem
suppresses.
"""


def is_touched(what: str) -> bool:
    """Record a call that came through ipygpumem; others, as IPython, torch and pytest, may make
    theirs.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("ipygpumem"):
            touched.append(what)
            return True
        frame = frame.f_back
    return False


def trap(name: str) -> Callable[..., Any]:
    """Return a method that records who called it and raises."""

    def method(*args: object, **kwargs: object) -> Any:
        is_touched(name)
        raise RuntimeError("hands off")

    return method


_NAMES = """__repr__ __str__ __eq__ __ne__ __hash__ __bool__ __len__ __iter__ __getattr__ __getattribute__ __format__
__sizeof__ __reduce__ __reduce_ex__ __dir__ __contains__ __getitem__ __call__ __index__ __int__ __lt__ __array__
__enter__ __instancecheck__ __subclasscheck__ __setattr__ __delattr__ __array_interface__ __torch_function__
__next__ __missing__ __copy__ __deepcopy__ __get__"""  # noqa: E501
body: dict[str, Any] = {name: trap(name) for name in _NAMES.split()} | {
    "__class__": property(trap("__class__"))
}
"""Attributes of a class with any base; NumPy asks a type itself: ``type("Array", (numpy.ndarray,),
body)``.
"""


_ASKED = """__repr__ __eq__ __hash__ __bool__ __len__ __iter__ __instancecheck__ __subclasscheck__ __getattribute__"""  # noqa: E501
_asked = {name: trap(f"type.{name}") for name in _ASKED.split()}
_asked |= {name: property(trap(f"type.{name}")) for name in ("__name__", "__module__")}
Meta: Any = type("Meta", (type,), _asked)
"""The type of classes that may not be asked either."""


Hostile = Meta("Hostile", (), body)
Container = Meta("Container", (dict,), body)
Sequence = Meta("Sequence", (list,), body)
Slotted = Meta(
    "Slotted", (), {**body, "__slots__": ("content",), "__dict__": property(trap("__dict__"))}
)
Lazy = Meta("Lazy", (types.ModuleType,), body)
# Of types that others can ask: IPython shows such an error, and calls such a function.
_SHOWN = ("__str__", "__repr__", "__eq__", "__bool__", "__len__", "__hash__", "__getattribute__")
Oom = type(
    "Oom", (MemoryError,), {**{name: body[name] for name in _SHOWN}, "args": property(trap("args"))}
)
Function = type("Function", (), {name: body[name] for name in ("__call__", "__getattribute__")})


def made(kind: Any, content: object = None) -> Any:
    """Return a new object of one of these classes, with what ``content`` is where
    that can be said.
    """
    bases = (dict, list, types.ModuleType, MemoryError, object)
    base: Any = next(base for base in bases if type.__subclasscheck__(base, kind))
    thing = base.__new__(kind)
    if base is types.ModuleType:
        base.__init__(thing, "lazy")
    elif base in (list, dict):
        base.__init__(thing, content or ())
    elif content is not None:
        object.__setattr__(thing, "content", content)
    return thing


def tensors(*, device: bool = True) -> dict[str, Any]:
    """Return tensors of 4 MiB whose classes have functions of their own, by what those are asked
    for.

    Those that are asked for their sizes are asked for their ``device``, too, where that is wanted.
    """
    import torch

    def asked(name: str) -> Any:
        if is_touched(name):
            raise RuntimeError("hands off")

    class Function(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            asked(f"function {function}")
            return super().__torch_function__(function, types, args, kwargs or {})

        def __getattribute__(self, name: str) -> Any:
            asked(name)
            return super().__getattribute__(name)

        shape = property(lambda self: asked("shape"))
        dtype = property(lambda self: asked("dtype"))
        device = property(lambda self: asked("device"))
        __repr__ = __len__ = __eq__ = untyped_storage = numel = trap("a method")  # type: ignore[assignment]
        __hash__ = None  # type: ignore[assignment]

    class Dispatch(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: Any, policy: str | None) -> Any:
            asks = {
                "dispatch_sizes_strides_policy": policy,
                "dispatch_device": device and policy is not None,
            }
            make = torch.Tensor._make_wrapper_subclass
            return make(cls, inner.shape, dtype=inner.dtype, device=inner.device, **asks)

        def __init__(self, inner: Any, policy: str | None) -> None:
            self.inner = inner

        @classmethod
        def __torch_dispatch__(
            cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            asked(f"dispatch {function}")
            return torch.device("cpu") if "device" in str(function) else list(args[0].inner.shape)

    made: dict[str, Any] = {"function": torch.ones(1 << 20).as_subclass(Function)}
    return made | {
        f"{policy}": Dispatch(torch.ones(1 << 20), policy) for policy in (None, "sizes", "strides")
    }


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """Fail a test whose block makes ipygpumem call something."""
    touched.clear()
    yield
    assert touched == []


if "__file__" in globals():  # not in a kernel
    import inspect

    SOURCE = inspect.getsource(sys.modules[__name__])
