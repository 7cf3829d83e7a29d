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
_running_node: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
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
Key = tuple[int, int]
"""A thread and the number of a node that it made."""


class Node(NamedTuple):
    """Record of a node of the graph."""

    operation: str
    """The operation, or the class of a custom function."""
    module: str
    line: Line | None
    is_by_engine: bool
    """True if no Python code asked for the operation: a backward pass with ``create_graph``."""


class FollowedGraph:
    """The autograd nodes that operations of the followed code have created."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        """The thread that runs the followed code."""
        self._nodes: dict[Key, Node] = {}
        self._equal_nodes: dict[Node, Node] = {}
        """Equal nodes, so that a loop keeps one of each."""
        self._numbers: dict[int, int] = {self._thread: _next_number()}
        """The number of each thread's next node, at its last operation."""

    def has_new_node(self, func: Any) -> bool:
        """Return True if autograd has created a node in this thread since the thread's last
        operation; its backward pass may allocate memory.

        This operation is the last one then: ask once for each, and before ``record_node``.
        """
        number, thread = _next_number(), _this_thread()
        last_number = self._numbers.get(thread)
        if number == last_number or id(func) in WITHOUT_MEMORY:
            return False
        self._numbers[thread] = number
        return last_number is not None

    def record_node(self, operation: str, call: CallingCode) -> None:
        """Record the origin of the node that autograd has created last in this thread, for an
        operation.
        """
        node = self._record_of_operation(operation, call)
        if len(self._nodes) >= _MOST_NODES:
            self._drop_older_half()
        thread = threading.get_ident()
        number = self._numbers[thread] - 1
        self._nodes[thread, number] = self._equal_nodes.setdefault(node, node)

    def _record_of_operation(self, operation: str, call: CallingCode) -> Node:
        """Return the record of a node that an operation has made."""
        if call.functions:  # the function's node was made before its operations
            function = call.functions[0]
            operation, module, line = function.name, function.module, function.line
        else:
            module, line = call.module, call.line
        has_users_line = line is not None or bool(module)
        # In a thread of autograd's engine, no frame is of the user's code.
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
            return Origin("", call.module, operation, call.line)
        node = self._running_node_record(call)
        if node is None:
            return Origin("", call.module, operation, self._backward_line(call))
        if "backward" not in operation:
            operation += " in backward"
        if node.module:
            operation += f" of {node.module}"
        return Origin("", "", operation, node.line)

    def _line_in_backward(self, call: CallingCode) -> Line | None:
        """Return the line whose operation created the running node, or the line that started the
        backward pass.
        """
        node = self._running_node_record(call)
        return self._backward_line(call) if node is None else node.line

    def _backward_line(self, call: CallingCode) -> Line | None:
        """Return the line that started the backward pass, whose thread waits for the end of it."""
        return call.backward_line or line_of_thread(self._thread)

    def _running_node_record(self, call: CallingCode) -> Node | None:
        """Return the record of the node that runs now; None if it is unknown or not certain."""
        running = _running_node()
        if running is None:
            return None
        name, number = running.name(), running._sequence_nr()
        if name == _COPY_SLICES:
            number -= 1
        thread = self._thread
        if call.engine is not None:
            # A backward pass of this thread, as in a checkpoint, whose graph this thread has made.
            thread = threading.get_ident()
        node = self._nodes.get((thread, number))
        if node is not None and _can_have_made(node.operation, name):
            return node
        return self._node_made_in_backward(name, number)

    def _node_made_in_backward(self, name: str, number: int) -> Node | None:
        """Return the record of the node with a name and a number that a backward pass has made, in
        any thread; None if several nodes may be meant.
        """
        candidates = set[Node]()
        for thread in list(self._numbers):  # other threads may add theirs
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
