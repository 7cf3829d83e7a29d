"""Finds the operations that autograd calls in place on gradients of plain tensors.

For tensor subclasses, such as fake tensors, it calls the out-of-place operator instead, which would
allocate more.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch

from ipygpumem.heap.holders.frames import stack
from ipygpumem.introspect import is_ours

_ATEN = torch.ops.aten
_LOSS_IN_PLACE = (_ATEN.mul.Tensor, _ATEN.sub.Tensor)
IN_PLACE = (
    _ATEN.add.Tensor,
    _ATEN.index_add.default,
    _ATEN.index_fill.int_Scalar,
    _ATEN.index_fill.int_Tensor,
    _ATEN.index_put.default,
    _ATEN.masked_fill.Scalar,
    _ATEN.put.default,
    _ATEN.scatter.src,
    _ATEN.scatter.value,
    _ATEN.scatter_add.default,
    *_LOSS_IN_PLACE,
)
"""Operators that autograd calls in place if nothing else references the tensor."""
# Older versions of torch have neither.
_CAN_COUNT = hasattr(torch.Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")
_MOST_USES = 4
"""Maximum reference count of a tensor that only autograd references."""
_MORE_USES = {_ATEN.index_put.default: 1, **dict.fromkeys(_LOSS_IN_PLACE, 2)}
"""Further references that autograd has during an operator."""
_MOST_USES_OF_STORAGE = 2
_FOLDER = Path(torch.__file__).parent
_WRAPPERS = {
    str(_FOLDER / name)
    for name in ("_compile.py", "_dynamo/eval_frame.py", "utils/_python_dispatch.py")
}
"""Files of torch between autograd and a mode."""
_STARTERS = {str(_FOLDER / "autograd" / name) for name in ("graph.py", "__init__.py")}
"""Files of torch that start a backward pass."""
_current_node: Any = getattr(torch._C, "_current_autograd_node", lambda: None)
_COPIED = re.compile(
    "(MaskedFill|MaskedScatter|Xlogy|Scatter|ScatterReduce|Index(Put|Fill|Copy|Reduce))Backward"
)
"""Nodes whose formulas never change a gradient in place."""
_LOSS = "BinaryCrossEntropyWithLogitsBackward"


def works_in_place(func: Any, args: Any) -> bool:
    """Return True if autograd itself calls an operator, and would call it in place."""
    if not _CAN_COUNT or torch.is_grad_enabled():
        return False
    return (
        _formula_works_in_place(func)
        and _has_shape_of_result(func, args)
        and _is_autograds_alone(func, args[0])
        and _is_called_by_autograd()
    )


def _formula_works_in_place(func: Any) -> bool:
    """Return True if the current autograd node may change a gradient in place.

    Without a node, autograd accumulates gradients.
    """
    node = _current_node()
    name = "" if node is None else node.name()
    if func in _LOSS_IN_PLACE:
        return bool(name.startswith(_LOSS))
    return not _COPIED.match(name)


def _has_shape_of_result(func: Any, args: Any) -> bool:
    """Return True if the first argument has the shape of the operator's result."""
    shape = args[0].shape
    if func is _ATEN.add.Tensor:
        return isinstance(args[1], torch.Tensor) and shape == args[1].shape
    if func in _LOSS_IN_PLACE:
        return bool(shape == torch.broadcast_shapes(shape, args[1].shape))
    return True


def _is_autograds_alone(func: Any, tensor: Any) -> bool:
    """Return True if only autograd references a tensor, which has its storage for itself."""
    if tensor.layout is not torch.strided:
        return False
    if tensor._use_count() > _MOST_USES + _MORE_USES.get(func, 0):
        return False
    # Without a variable for the storage, which might be one more reference.
    if torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > _MOST_USES_OF_STORAGE:
        return False
    return bool(tensor.untyped_storage().nbytes() == tensor.nbytes)  # neither part nor expanded


def _is_called_by_autograd() -> bool:
    """Return True if the calling frame started the backward pass, or if there is none.

    Autograd's own threads have no such frame.
    """
    for frame in stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if file not in _WRAPPERS and not is_ours(file):
            return file in _STARTERS
    return True
