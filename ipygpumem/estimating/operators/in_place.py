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

from ipygpumem.heap.knowledge.frames import stack
from ipygpumem.introspect import is_ours

_ATEN = torch.ops.aten
_OF_LOSS = (_ATEN.mul.Tensor, _ATEN.sub.Tensor)
_INDEXED = (
    _ATEN.index_add.default,
    _ATEN.index_fill.int_Scalar,
    _ATEN.index_fill.int_Tensor,
    _ATEN.index_put.default,
    _ATEN.put.default,
)
_SCATTERED = (
    _ATEN.masked_fill.Scalar,
    _ATEN.masked_scatter.default,
    _ATEN.scatter.src,
    _ATEN.scatter.value,
    _ATEN.scatter_add.default,
)
_LOGICAL = (_ATEN.logical_and.default, _ATEN.logical_or.default)
IN_PLACE = (
    _ATEN.add.Tensor,
    *_INDEXED,
    *_LOGICAL,
    *_OF_LOSS,
    *_SCATTERED,
)
"""Operators that autograd calls in place if nothing else references the tensor."""
# Older versions of torch do not have these counts.
_HAS_COUNTS_OF_TENSORS = hasattr(torch.Tensor, "_use_count")
_HAS_COUNTS_OF_STORAGES = hasattr(torch._C, "_storage_Use_Count")
_MOST_USES = 4
"""Maximum reference count of a tensor that only autograd references."""
_FURTHER_USES = {
    _ATEN.index_put.default: 1,
    **dict.fromkeys((*_OF_LOSS, *_LOGICAL), 2),
}
"""Further references that autograd has during an operator."""
_MOST_USES_OF_STORAGE = 2
"""Maximum reference count of a storage that only such a tensor has."""
_FOLDER = Path(torch.__file__).parent
_WRAPPERS = {
    str(_FOLDER / "_compile.py"),
    str(_FOLDER / "_dynamo/eval_frame.py"),
    str(_FOLDER / "utils/_python_dispatch.py"),
}
"""Files of torch between autograd and a mode."""
_STARTERS = {
    str(_FOLDER / "autograd/graph.py"),
    str(_FOLDER / "autograd/__init__.py"),
}
"""Files of torch that start a backward pass."""
_NODES_THAT_COPY = re.compile(
    "(MaskedFill|MaskedScatter|Xlogy|Scatter|ScatterReduce|Index(Put|Fill|Copy|Reduce))Backward"
)
"""Nodes whose formulas never change a gradient in place."""
_NODES_THAT_ADD = re.compile("(Atan2|Linalg(CholeskyEx|LuFactorEx)|Logcumsumexp)Backward")
"""Nodes whose formulas add up new tensors."""
_NODES_OF_LOSS = re.compile("BinaryCrossEntropyWithLogitsBackward")
_NODES_THAT_SELECT = re.compile("(Clamp|Max|Min|Median|Nanmedian|Amax|Amin)Backward")
"""Nodes whose formulas combine masks in place."""
_NODES_BY_OPERATOR = {
    **dict.fromkeys(_OF_LOSS, _NODES_OF_LOSS),
    **dict.fromkeys(_LOGICAL, _NODES_THAT_SELECT),
}
"""Operators that only some nodes' formulas call in place, and these nodes."""


def works_in_place(func: Any, args: Any) -> bool:
    """Return True if autograd itself calls an operator, and would call it in place.

    Otherwise the user's code calls it, as in a hook, or the tensor is needed elsewhere.
    """
    if not _HAS_COUNTS_OF_TENSORS or not _HAS_COUNTS_OF_STORAGES:
        return False
    if torch.is_grad_enabled() or not _formula_works_in_place(func):
        return False
    if not _has_shape_of_result(func, args):
        return False
    return _is_referenced_by_autograd_alone(func, args[0]) and _is_called_by_autograd()


def _formula_works_in_place(func: Any) -> bool:
    """Return True if the formula of the current autograd node calls an operator in place.

    Without a node, autograd adds a gradient to an earlier one, in place.
    """
    name = _current_node_name()
    nodes = _NODES_BY_OPERATOR.get(func)
    if nodes is not None:
        return bool(nodes.match(name))
    if func is _ATEN.add.Tensor and _NODES_THAT_ADD.match(name):
        return False
    return not _NODES_THAT_COPY.match(name)


def _current_node_name() -> str:
    """Return the name of the autograd node that runs; empty if there is none."""
    if not hasattr(torch._C, "_current_autograd_node"):  # in older versions of torch
        return ""
    node = torch._C._current_autograd_node()
    if node is None:
        return ""
    return str(node.name())


def _has_shape_of_result(func: Any, args: Any) -> bool:
    """Return True if the first argument has the shape of the operator's result."""
    shape = args[0].shape
    if func is _ATEN.add.Tensor:
        return isinstance(args[1], torch.Tensor) and shape == args[1].shape
    if func in _NODES_BY_OPERATOR:
        result_shape = torch.broadcast_shapes(shape, args[1].shape)
        return bool(shape == result_shape)
    return True


def _is_referenced_by_autograd_alone(func: Any, tensor: Any) -> bool:
    """Return True if only autograd references a tensor that fills a storage of its own."""
    if tensor.layout is not torch.strided:
        return False
    most_uses = _MOST_USES + _FURTHER_USES.get(func, 0)
    if tensor._use_count() > most_uses:
        return False
    # Without a variable for the storage, which might be one more reference.
    uses_of_storage = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    if uses_of_storage > _MOST_USES_OF_STORAGE:
        return False
    storage_bytes = tensor.untyped_storage().nbytes()
    return bool(storage_bytes == tensor.nbytes)  # neither a part nor expanded


def _is_called_by_autograd() -> bool:
    """Return True if the frame that calls the operator is the one that started the backward pass.

    Autograd's own threads have no Python frame at all, and then the result is also True.
    """
    for frame in stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if file not in _WRAPPERS and not is_ours(file):
            return file in _STARTERS
    return True
