"""Frees garbage that Python's collector cannot see: a gradient whose graph leads back to its own tensor.

After ``backward(create_graph=True)`` a leaf refers to its gradient, the gradient to its graph, and the graph's
``AccumulateGrad`` to the leaf: a cycle in torch's C++, which nothing ends but ``.grad = None``. Such cycles are found
as CPython finds its own: for each tensor the references that tensors and graphs account for are subtracted from all
that there are. What has some left is held by somebody; what such tensors lead to is in use; the rest is garbage.

Whatever cannot be accounted for counts as held, so that a doubt keeps a tensor and never frees one.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import compress
from typing import Any

from ipygpumem.introspect import class_dict, is_instance
from ipygpumem.objects.arrays import library_type
from ipygpumem.objects.garbage import Garbage
from ipygpumem.objects.heap import live_instances
from ipygpumem.objects.holders.graphs import known_tensors, saved_by

_MOST_STEPS = 400_000


def collect(garbage: Garbage) -> int:
    """Free the tensors that only the graphs of gradients keep alive, and what dies with them; return how many."""
    count = cut(garbage)
    if count:
        garbage.collect()  # hooks and other objects that the tensors held
    return count


def cut(garbage: Garbage, *, steps: int = _MOST_STEPS) -> int:
    """Empty ``.grad`` of the tensors that nothing but graphs of gradients keeps alive; return how many.

    Args:
        garbage: knows the tensors.
        steps: a search among more tensors and nodes of graphs ends without having changed anything. Seconds would let
            a busy machine decide what is freed.
    """
    torch: Any = sys.modules.get("torch")
    base: Any = library_type("torch", "Tensor")
    if base is None or not _can_count(torch, base):
        return 0
    with torch._C.DisableTorchFunction():  # a mode or a subclass of the user's must not run
        tensors, _ = known_tensors(garbage)
        if not any(_is_suspect(base, tensor) for tensor in tensors) or _are_some_hidden(base):
            return 0
        try:
            loose, holds = _Accounts(base, tensors, steps).garbage()
        except _TooManyError:
            return 0
        del tensors
        if _holds(base, loose) != holds:  # another thread has got hold of something meanwhile
            return 0
        for tensor in loose:
            base.grad.__set__(tensor, None)
    return len(loose)


def _can_count(torch: Any, base: Any) -> bool:
    """Whether all that holds a tensor can be counted: no mode sees what is done to tensors."""
    dual: Any = sys.modules.get("torch.autograd.forward_ad")
    try:
        return (
            hasattr(base, "_use_count")
            and torch._C._len_torch_dispatch_stack() == 0
            and torch._C._functorch.maybe_current_level() is None  # torch.func keeps tensors in C++ meanwhile
            and getattr(dual, "_current_level", -1) < 0  # and so does forward differentiation
        )
    except AttributeError:  # an older torch
        return False


def _are_some_hidden(base: type) -> bool:
    """Whether there may be tensors that the collector does not list.

    They may be in attributes of TorchScript's modules, or frozen; then torch's classes are so too. (Python 3.12 has
    frozen some objects of its own when it starts.)
    """
    scripted = library_type("torch.jit", "ScriptModule")
    if scripted is not None and live_instances(scripted):
        return True
    return gc.get_freeze_count() > 0 and not any(kind is base for kind in gc.get_objects())


def _is_suspect(base: Any, tensor: Any) -> bool:
    """Whether a tensor has a gradient that has a graph."""
    gradient = _gradient(base, tensor)
    return gradient is not None and base.grad_fn.__get__(gradient) is not None


def _gradient(base: Any, tensor: Any) -> Any:
    """Return the gradient of a tensor that may have one; asking others makes torch warn."""
    may = base.is_leaf.__get__(tensor) or base.retains_grad.__get__(tensor)
    return base.grad.__get__(tensor) if may else None


def _holds(base: Any, tensors: list[Any]) -> list[int]:
    """Return for each tensor how many references hold it, from C++ and from Python, beside the list itself.

    A Python object has one reference more as long as C++ refers to its tensor too, in some versions of torch. What
    that is shows in two tensors whose references are known.
    """
    empty = sys.modules["torch"].empty
    owner, in_both, alone = (empty(0, device="cpu") for _ in range(3))
    base.grad.__set__(owner, in_both)
    tensors += [in_both, alone]
    del in_both, alone
    use_count = base._use_count
    counts = [(use_count(tensor), sys.getrefcount(tensor)) for tensor in tensors]
    del tensors[-2:]
    of_both, of_alone = (count for _, count in counts[-2:])
    return [uses - 1 + count - (of_both if uses > 1 else of_alone) for uses, count in counts[:-2]]


class _TooManyError(Exception):
    """There is more to look at than the search may look at."""


class _Accounts:
    """Who holds which tensor, as far as tensors and graphs account for it."""

    def __init__(self, base: Any, tensors: list[Any], steps: int) -> None:
        self._base = base
        self._left = steps
        self._holds = dict(zip(map(id, tensors), _holds(base, tensors), strict=True))
        nodes = _nodes_with_objects()
        self._nodes = dict(zip(map(id, nodes), zip(nodes, _from_python(nodes), strict=True), strict=True))
        self._tensors = {id(tensor): tensor for tensor in tensors}
        self._seen: dict[int, Any] = {}
        """All that was looked at, by identity: kept, so that identities hold."""
        self._links: dict[int, list[int]] = {}

    def garbage(self) -> tuple[list[Any], list[int]]:
        """Return the tensors to cut loose, and for each the number of references that hold it.

        Raises:
            _TooManyError: there are more than that.
        """
        suspects = [tensor for tensor in self._tensors.values() if _is_suspect(self._base, tensor)]
        explained = Counter(target for item in self._reach(suspects) for target in self._links[id(item)])
        new = [item for key, item in self._seen.items() if key not in self._tensors and is_instance(item, self._base)]
        # Python had no object for these until now: only C++ can hold them.
        self._holds.update((id(item), self._base._use_count(item) - 1) for item in new)
        candidates = [*self._tensors.values(), *new]
        roots = [item for item in candidates if self._holds[id(item)] != explained[id(item)]]
        # Whether an object that no suspect leads to is there for Python's sake is not to be seen: it counts as held.
        roots += [node for key, (node, held) in self._nodes.items() if held or key not in explained]
        in_use = {id(item) for item in self._reach(roots)}
        loose = [tensor for tensor in suspects if id(tensor) not in in_use]
        return loose, [self._holds[id(tensor)] for tensor in loose]

    def _reach(self, starts: Iterable[Any]) -> Iterator[Any]:
        """Yield all tensors and nodes to which ``starts`` lead through gradients and graphs, each once."""
        waiting = list(starts)
        done: set[int] = set()
        while waiting:
            item = waiting.pop()
            if id(item) in done:
                continue
            self._left -= 1
            if self._left < 0:
                raise _TooManyError
            done.add(id(item))
            waiting += self._following(item)
            yield item

    def _following(self, item: Any) -> list[Any]:
        """Return what a tensor or node refers to, once for each reference."""
        if id(item) not in self._links:
            targets = list(self._of_tensor(item) if is_instance(item, self._base) else _of_node(item))
            self._seen[id(item)] = item
            self._seen.update((id(target), target) for target in targets)
            self._links[id(item)] = [id(target) for target in targets]
        return [self._seen[target] for target in self._links[id(item)]]

    def _of_tensor(self, tensor: Any) -> Iterator[Any]:
        base = self._base
        of_view = base._base.__get__(tensor) if base._is_view(tensor) else None
        behind = (_gradient(base, tensor), base.grad_fn.__get__(tensor), of_view)
        return (item for item in behind if item is not None)


def _of_node(node: Any) -> Iterator[Any]:
    try:
        yield from (following for following, _ in node.next_functions if following is not None)
    except (AttributeError, RuntimeError):  # the context of a function that made no graph
        return
    yield from saved_by(node)


def _nodes_with_objects() -> list[Any]:
    """Return the nodes of graphs that have a Python object: somebody has asked for it."""
    tracked = gc.get_objects()
    kinds = list(map(id, map(type, tracked)))
    types = dict(zip(kinds, map(type, tracked), strict=True))
    nodes = {key for key, kind in types.items() if _is_node(kind)}
    return list(compress(tracked, map(nodes.__contains__, kinds)))


def _is_node(kind: type) -> bool:
    return any("next_functions" in class_dict(base) for base in type.mro(kind))


def _from_python(nodes: list[Any]) -> list[bool]:
    """Return for each node, given that C++ refers to it, whether Python does too, beside the list itself.

    A node keeps its own Python object: that of a user's function once, others once or not at all, as torch's version
    has it. What it is shows in a node that nobody else refers to.
    """
    torch: Any = sys.modules["torch"]
    with torch.inference_mode(False), torch.enable_grad():
        result = torch.empty(0, device="cpu", requires_grad=True).view(0)
    nodes += [result.grad_fn, object()]
    counts = [sys.getrefcount(node) for node in nodes]
    del nodes[-2:]
    *counts, preserved, unknown = counts
    context = torch._C._FunctionBase
    return [
        count > (unknown + 1 if is_instance(node, context) else preserved)
        for node, count in zip(nodes, counts, strict=True)
    ]
