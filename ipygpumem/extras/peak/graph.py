"""Finds the line of the forward pass that made a node of autograd's graph.

autograd runs the backward pass of a CUDA device in a thread of its own, without a line of the
user's code. Each node has a number, which its thread counts up. An operation of the forward pass is
dispatched after its node was made, so the thread's last number is that of the operation's node.
Nothing is added to the graph, in contrast to torch's anomaly mode.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import torch

from ipygpumem.extras.peak.origins import CallingCode, Line, Origin, line_of_thread

# An old torch may lack these two: then operations of a backward pass have the line that started it.
_next_number: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)
_torchs_running_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
_this_thread = threading.get_ident
_MOST_NODES = 100_000
"""Number of nodes whose origins are kept, of some 150 bytes each; beyond it, the older half is
dropped.
"""
_COPY_SLICES = "torch::autograd::CopySlices"
"""Node of an operation in place on a view. It is made after the operation's own node, which it
runs.
"""
_ATEN = torch.ops.aten
WITHOUT_MEMORY = set(
    map(
        id,
        [
            _ATEN.t.default,
            _ATEN.view.default,
            _ATEN._unsafe_view.default,
            _ATEN._reshape_alias.default,
            _ATEN.transpose.int,
            _ATEN.permute.default,
            _ATEN.squeeze.dim,
            _ATEN.unsqueeze.default,
            _ATEN.alias.default,
            _ATEN.detach.default,
        ],
    )
)
"""Identities of operations whose backward passes only make views. A third of the operations of a
transformer are of these. Operators are slow to hash.
"""
NodeKey = tuple[int, int]
"""A thread and the number of a node that it made."""


class Node(NamedTuple):
    """The origin of a node of autograd's graph."""

    operation: str
    """The operation, or the class of a custom function."""
    module: str
    """The path of the module that ran it; empty outside modules."""
    line: Line | None
    """The user's line that ran it; None if it is unknown."""
    is_by_engine: bool
    """True if no Python code asked for the operation: a backward pass with ``create_graph``."""


class FollowedGraph:
    """The autograd nodes that operations of the followed code have created."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        """The thread that runs the followed code."""
        self._nodes: dict[NodeKey, Node] = {}
        self._equal_nodes: dict[Node, Node] = {}
        """Equal nodes, so that a loop keeps one of each."""
        self._next_number_of: dict[int, int] = {self._thread: _next_number()}
        """The number of each thread's next node, when its last operation began."""

    def note_operation(self, func: Any) -> int | None:
        """Note that an operation begins in this thread, and return the number of its node.

        autograd has made that node just before, if a backward pass will need one. None means that
        it has made none since the last operation, or one whose backward pass takes no memory. The
        nodes before a thread's first operation are not known to be of an operation.
        """
        next_number = _next_number()
        thread = _this_thread()
        earlier_number = self._next_number_of.get(thread)
        if next_number == earlier_number or id(func) in WITHOUT_MEMORY:
            return None
        self._next_number_of[thread] = next_number
        if earlier_number is None:
            return None
        return next_number - 1

    def record_node(self, number: int, operation: str, call: CallingCode) -> None:
        """Record the origin of the node with this number, which an operation of this thread has.

        Args:
            number: as ``note_operation`` returned it.
            operation: the operation's name.
            call: the code that asks for the operation.
        """
        node = self._node_of_operation(operation, call)
        if len(self._nodes) >= _MOST_NODES:
            self._drop_older_half()
        self._nodes[_this_thread(), number] = self._equal_nodes.setdefault(node, node)

    def _node_of_operation(self, operation: str, call: CallingCode) -> Node:
        """Return the origin of the node that autograd has made for an operation."""
        if call.functions:  # the function's node was made before its operations
            function = call.functions[0]
            operation, module, line = function.name, function.module, function.line
        else:
            module, line = call.module, call.line
        has_users_line = line is not None or bool(module)
        # A backward pass makes nodes, too, for a second derivative (``create_graph=True``). It runs
        # in a thread of autograd's engine, in which no frame is of the user's code.
        is_by_engine = not has_users_line and torch._C._current_graph_task_id() != -1
        if is_by_engine:
            line = self._line_in_backward(call)
        return Node(operation, module, line, is_by_engine)

    def _drop_older_half(self) -> None:
        """Forget the older half of the nodes."""
        self._nodes = dict(islice(self._nodes.items(), len(self._nodes) // 2, None))
        self._equal_nodes = {node: node for node in self._nodes.values()}

    def origin(self, operation: str, call: CallingCode) -> Origin:
        """Return the origin of an operation that autograd runs now.

        That is the line of a hook or of a custom function, if one asked for the operation; else the
        line of the forward pass that made the running node; else the line that started the backward
        pass.
        """
        if call.line is not None:
            return Origin(module=call.module, operation=operation, line=call.line)
        node = self._running_node(call)
        if node is None:
            line = self._backward_line(call)
            return Origin(module=call.module, operation=operation, line=line)
        if "backward" not in operation:
            operation += " in backward"
        if node.module:
            operation += f" of {node.module}"
        return Origin(operation=operation, line=node.line)

    def _line_in_backward(self, call: CallingCode) -> Line | None:
        """Return the line whose operation created the running node, or the line that started the
        backward pass.
        """
        node = self._running_node(call)
        if node is None:
            return self._backward_line(call)
        return node.line

    def _backward_line(self, call: CallingCode) -> Line | None:
        """Return the line that started the backward pass, whose thread waits for the end of it."""
        return call.backward_line or line_of_thread(self._thread)

    def _running_node(self, call: CallingCode) -> Node | None:
        """Return the origin of the node that autograd runs now; None if it is unknown or not
        certain.
        """
        running = _torchs_running_node()
        if running is None:
            return None
        name, number = running.name(), running._sequence_nr()
        if name == _COPY_SLICES:
            number -= 1  # the operation's own node, which was recorded, was made just before
        thread = self._thread
        if call.engine is not None:
            # A backward pass of this thread, as in a checkpoint, whose graph this thread has made.
            thread = threading.get_ident()
        node = self._nodes.get((thread, number))
        if node is not None and _can_have_made(node.operation, name):
            return node
        return self._node_made_in_backward(name, number)

    def _node_made_in_backward(self, name: str, number: int) -> Node | None:
        """Return the origin of the node with this name and number that a backward pass has made, in
        any thread; None if several nodes may be meant.
        """
        candidates = set[Node]()
        for thread in list(self._next_number_of):  # a copy: other threads may add theirs
            node = self._nodes.get((thread, number))
            if node is not None and node.is_by_engine and _can_have_made(node.operation, name):
                candidates.add(node)
        return candidates.pop() if len(candidates) == 1 else None


@functools.lru_cache(4096)
def _can_have_made(operation: str, node: str) -> bool:
    """Return True if autograd can have made a node for an operation, judged by their names: for
    ``nll_loss_forward`` it makes ``NllLossBackward0``.
    """
    if node == _COPY_SLICES:
        return True
    made_by = node.partition("Backward")[0].lower()
    return operation.replace("_", "").lower().startswith(made_by.replace("_", ""))
