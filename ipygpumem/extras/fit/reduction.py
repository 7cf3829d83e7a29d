"""Recognises from a loss's autograd graph whether it is a mean or a sum over the rows of a batch.

The parts of a batch get the gradients of the whole if the loss of a part is divided by the number
of parts for a mean, and not divided for a sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

MEAN, SUM = "mean", "sum"
MEAN_AND_SUM = "mean and sum"
"""The loss adds a mean over the rows to a sum over them."""
UNCLEAR = "unclear"
_REDUCTIONS = {1: MEAN, 2: SUM}
"""Codes of ``reduction`` in the graph's nodes of torch's loss functions."""
_MOST_NODES = 20_000
"""Maximum number of nodes that are followed between a loss and the layers below it."""
_SINGLE_ROWS = ("SelectBackward", "UnbindBackward")
"""Nodes that take single rows out of a tensor: code that takes all of them then adds them up."""
_SELECTIONS = ("SliceBackward", "Index", "GatherBackward", "MaskedSelect", "Split", "TakeBackward")
"""Nodes that leave out elements: the reduction above them decides."""
_LINEAR = (
    *("Add", "Sub", "Neg", "Mul", "Div", "View", "Reshape", "Squeeze", "Unsqueeze", "ToCopy"),
    *("Clone", "Alias", "Stack", "Cat", "Expand", "Unbind", "Select", "Sum", "Mean", "Permute"),
)
"""Beginnings of nodes after which a mean of scalars is still a mean, and a sum a sum."""

Path = frozenset[str]
"""The kinds of reductions over rows between a node and one of the layers below it.

For ``F.mse_loss(model(x), y)`` the only path has one kind: {"mean"}. A path with two kinds, or with
none, is unclear.
"""


@dataclass
class Loss:
    """Findings about the losses of the first run."""

    kinds: set[str] = field(default_factory=set)
    """The kind of each backward pass."""
    has_weight_terms: bool = False
    """True if a loss has a term of the weights alone, such as a penalty."""

    @property
    def kind(self) -> str:
        """``MEAN``, ``SUM``, ``MEAN_AND_SUM`` or ``UNCLEAR``."""
        if len(self.kinds) != 1:
            return UNCLEAR
        (kind,) = self.kinds
        return kind


@dataclass(kw_only=True)
class LossGraph:
    """The part of a graph between a loss and the layers of the models.

    A loss is a mean over the rows if each path from it to a layer passes one mean over rows, and a
    sum if each passes one sum.
    """

    rows: int
    """Number of rows of a batch."""
    has_leading_rows: bool
    """True if the rows are the first dimension of tensors, as in batches that are split."""
    layers: set[int]
    """Sequence numbers of the nodes that made the results of layers."""
    constants: set[int]
    """Sequence numbers of the nodes whose factors do not depend on the batch."""

    def record_kind(self, loss: Loss, tensor: Any) -> None:
        """Add the kind of one tensor from which a backward pass starts to the findings ``loss``."""
        paths: set[Path] = set()
        root = tensor.grad_fn
        if root is not None:
            paths = self._paths_from(root)
            for term in _terms(root):
                loss.has_weight_terms |= not self._paths_from(term)
        if self._has_rows(tuple(tensor.shape)):  # a gradient for each row was given
            paths = {path | {SUM} for path in paths}
        loss.kinds.add(_kind_of(paths))

    def _paths_from(self, root: Any) -> set[Path]:
        """Return the paths from a node to layers, without paths that end at weights and pass no
        layer.
        """
        paths_of: dict[Any, set[Path]] = {}
        for number, node in enumerate(self._bottom_up(root)):
            if number > _MOST_NODES:
                return {frozenset({UNCLEAR})}
            paths_of[node] = self._paths_through(node, paths_of)
        return paths_of[root]

    def _bottom_up(self, root: Any) -> Iterator[Any]:
        """Yield the nodes from the layers up to ``root``: each node after the nodes to which it
        leads.
        """
        waiting = [(root, False)]
        done: set[Any] = set()
        while waiting:
            node, is_expanded = waiting.pop()
            if node in done:
                continue
            if is_expanded:
                done.add(node)
                yield node
                continue
            waiting.append((node, True))
            if not self._is_layer(node):
                waiting += [(child, False) for child, _ in node.next_functions if child is not None]

    def _is_layer(self, node: Any) -> bool:
        """Return True for a node that has made the result of a layer: the search ends there."""
        return node._sequence_nr() in self.layers and node.name() != _LEAF

    def _paths_through(self, node: Any, paths_of: dict[Any, set[Path]]) -> set[Path]:
        """Return the paths from a node to layers, given the paths of the nodes below it."""
        if self._is_layer(node):
            return {frozenset()}
        paths: set[Path] = set()
        for child, number in node.next_functions:
            for path in paths_of.get(child, ()):
                kind = self._kind_of_edge(node, child, number)
                paths.add(path | {kind} if kind else path)
        return paths

    def _kind_of_edge(self, node: Any, child: Any, number: int) -> str:
        """Return the kind of reduction that a node applies to the rows of an input; empty if it
        does not reduce them.

        Args:
            node: the node.
            child: the node that has made the input.
            number: the place of the input among the results of ``child``.
        """
        outputs, results_of_child = _shapes(node), _shapes(child)
        if not outputs or number >= len(results_of_child) or self._changes_scale(node):
            return UNCLEAR
        before, after = results_of_child[number], outputs[0]
        has_fewer_elements = sum(map(math.prod, outputs)) < math.prod(before)
        name = node.name()
        if has_fewer_elements or name.startswith(_SINGLE_ROWS):
            return self._kind_of_reduction(node, before, after)
        # A scalar from a scalar: torch's loss functions and linear ones leave its kind as it is.
        is_of_loss_function = getattr(node, "_saved_reduction", 0) in _REDUCTIONS
        if not after and not name.startswith(_LINEAR) and not is_of_loss_function:
            return UNCLEAR
        return ""

    def _kind_of_reduction(self, node: Any, before: tuple[int, ...], after: tuple[int, ...]) -> str:
        """Return the kind of reduction of a node that has fewer elements than its input, or takes
        out single rows; empty if it does not reduce the rows.

        Args:
            node: the node.
            before: the shape of its input.
            after: the shape of its result.
        """
        name = node.name()
        keeps_rows = self.has_leading_rows and after[:1] == before[:1]
        if not self._has_rows(before) or (keeps_rows and before[0] % self.rows == 0):
            return ""
        if name.startswith(_SINGLE_ROWS):
            return SUM if getattr(node, "_saved_dim", 0) == 0 else ""
        if name.startswith(_SELECTIONS):
            return ""
        reduction = getattr(node, "_saved_reduction", 0)
        if reduction:
            return _REDUCTIONS.get(reduction, UNCLEAR)
        if name.startswith("Mean"):
            return MEAN
        return SUM if name.startswith(("SumBackward", "NansumBackward")) else UNCLEAR

    def _has_rows(self, shape: tuple[int, ...]) -> bool:
        """Return True if a tensor of this shape may have as many elements for each row."""
        return bool(shape) and math.prod(shape) % self.rows == 0

    def _changes_scale(self, node: Any) -> bool:
        """Return True if a node multiplies by a number that may depend on the size of the batch.

        For ``loss.sum() / len(x)`` the loss is a mean, although the graph has a sum.
        """
        name = node.name()
        if not name.startswith(("MulBackward", "DivBackward")):
            return False
        if node._sequence_nr() in self.constants:
            return False
        factor = getattr(node, "_saved_other", None)
        if factor is None or factor.dim() or factor.requires_grad:
            return False
        if isinstance(factor, FakeTensor):
            return True  # its value is not known
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            value = abs(complex(factor.item()))  # a number of the code
        inverse = 1 / value if value else 0.0
        return self._is_count(value) or self._is_count(inverse)

    def _is_count(self, value: float) -> bool:
        """Return True if ``value`` is a multiple of the batch's number of rows, such as the number
        of all tokens by which a loss is divided.
        """
        whole = round(value)
        return whole > 0 and whole % self.rows == 0 and math.isclose(value, whole, rel_tol=1e-6)


_LEAF = "torch::autograd::AccumulateGrad"


def _kind_of(paths: set[Path]) -> str:
    """Return the kind of a loss with these paths to layers."""
    kinds = set[str]()
    for path in paths:
        if len(path) != 1:
            return UNCLEAR
        kinds |= path
    if kinds == {MEAN, SUM}:
        return MEAN_AND_SUM
    return kinds.pop() if len(kinds) == 1 else UNCLEAR


def _terms(root: Any) -> Iterator[Any]:
    """Yield the nodes of the scalars that are added up to a loss."""
    waiting = [root]
    for _ in range(_MOST_NODES):
        if not waiting:
            return
        node = waiting.pop()
        if node.name().startswith(("AddBackward", "SubBackward")) and _shapes(node) == [()]:
            waiting += [child for child, _ in node.next_functions if child is not None]
        else:
            yield node


def _shapes(node: Any) -> list[tuple[int, ...]]:
    """Return the shapes of a node's outputs; of a parameter's, its own."""
    variable = getattr(node, "variable", None)
    if variable is not None:
        return [tuple(variable.shape)]
    return [tuple(each.shape) for each in getattr(node, "_input_metadata", ())]


def sequence_number(tensor: Any) -> int | None:
    """Return the number of the node that made a tensor; None if no gradient flows to it."""
    node = tensor.grad_fn
    return None if node is None else int(node._sequence_nr())
