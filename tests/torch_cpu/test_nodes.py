"""Number of nodes of autograd graphs that searches read, alone and together."""

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ipygpumem.heap.knowledge import nodes
from ipygpumem.heap.knowledge.nodes import Nodes

pytestmark = pytest.mark.usefixtures("others_out_of_sight")
LONGEST_CHAIN_KEPT = 50
LENGTH_OF_CHAIN = 400


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let searches begin as in a new process with a small limit."""
    monkeypatch.setattr(nodes, "LONGEST_CHAIN", LONGEST_CHAIN_KEPT)
    monkeypatch.setattr(nodes, "_ALL_SEARCHES", nodes._AllSearches())


def chain(length: int, first: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Return the results of steps of which each needs the one before."""
    tensors = [torch.ones(1, requires_grad=True) if first is None else first]
    for _ in range(length):
        tensors.append(tensors[-1] * 2)
    return tensors[1:]


def search(*tensors: torch.Tensor) -> tuple[int, bool]:
    """Return the number of nodes that one search reads, and True if it leaves out some."""
    nodes = Nodes()
    count = 0
    for tensor in tensors:
        count += len(list(nodes.of(tensor)))
    return count, nodes.is_full


def objects() -> int:
    """Return the number of nodes with Python objects, without leaves."""
    return sum(type(item).__name__ == "MulBackward0" for item in gc.get_objects())


Order = Callable[[list[torch.Tensor]], list[list[torch.Tensor]]]
"""Returns the tensors of each search."""
ORDERS: dict[str, Order] = {
    "the last one": lambda steps: [[steps[-1]]],
    "oldest first": lambda steps: [steps],
    "newest first": lambda steps: [steps[::-1]],
    "each in a search of its own": lambda steps: [[step] for step in steps],
    "each in a search of its own, newest first": lambda steps: [[step] for step in steps[::-1]],
    "parts": lambda steps: [[steps[place]] for place in (399, 300, 200, 100, 0, 50, 150, 250, 350)],
    "short parts, from below": lambda steps: [[steps[place]] for place in range(20, 400, 20)],
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_searches_together_read_no_longer_chain(
    order: Callable[[list[torch.Tensor]], list[list[torch.Tensor]]],
) -> None:
    steps = chain(LENGTH_OF_CHAIN)
    before = objects()
    for tensors in order(steps) * 2:
        search(*tensors)
    assert 0 < objects() - before <= LONGEST_CHAIN_KEPT


def test_a_graph_that_grows_is_read_up_to_the_limit() -> None:
    before = objects()
    steps = chain(1)
    for _ in range(40):  # all stay: one with the identity of a dead tensor would count as read
        steps += chain(10, steps[-1])
        search(steps[-1])
    assert 0 < objects() - before <= LONGEST_CHAIN_KEPT


def test_a_search_stopped_early_counts_the_nodes_it_has_read() -> None:
    steps = chain(LENGTH_OF_CHAIN)
    before = objects()
    for step in steps:
        for _ in Nodes().of(step):
            break
    assert 0 < objects() - before <= LONGEST_CHAIN_KEPT


def test_a_second_search_finds_the_same_nodes() -> None:
    steps = chain(LENGTH_OF_CHAIN)
    first = search(steps[-1])
    assert first[0] > LONGEST_CHAIN_KEPT / 2
    assert first[1]
    assert search(steps[-1]) == first


def test_many_short_graphs_are_read_in_full() -> None:
    losses = [chain(10)[-1] for _ in range(100)]
    assert search(*losses) == (100 * 11, False)
    assert search(*losses) == (100 * 11, False)


def test_a_dead_graph_leaves_the_limit_to_the_next() -> None:
    for _ in range(5):
        last = chain(LONGEST_CHAIN_KEPT - 10)[-1]
        assert search(last) == (LONGEST_CHAIN_KEPT - 10 + 1, False)
        del last
        gc.collect()


def test_searches_of_a_living_graph_list_the_heap_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = chain(LENGTH_OF_CHAIN)
    search(steps[-1])
    lists = list[int]()
    get_objects = gc.get_objects

    def note_list() -> list[Any]:
        lists.append(1)
        return get_objects()

    monkeypatch.setattr(gc, "get_objects", note_list)

    # Most searches are answered from what the first one knew.
    for step in steps[:200]:
        search(step)
    assert 0 < len(lists) < 10

    # A new graph is found once the old one has gone.
    del step, steps
    gc.collect()
    nodes.expect_dead_nodes()
    assert search(chain(LONGEST_CHAIN_KEPT - 10)[-1]) == (LONGEST_CHAIN_KEPT - 10 + 1, False)


def test_a_nodes_identity_may_be_given_to_another_node() -> None:
    for _ in range(5):
        last = chain(LENGTH_OF_CHAIN)[-1]
        before = objects()
        search(last)
        assert 0 < objects() - before <= LONGEST_CHAIN_KEPT
        del last
        gc.collect()


def test_a_tensor_with_a_graph_is_told_without_reading_it() -> None:
    steps = chain(LENGTH_OF_CHAIN)
    before = objects()
    assert all(map(nodes.has_graph, steps))
    assert objects() == before
    assert not nodes.has_graph(torch.ones(1, requires_grad=True))


def test_a_view_of_a_changed_tensor_has_a_graph() -> None:
    base = torch.zeros(4)
    weight = torch.ones(1, requires_grad=True)
    view = base[0]
    base.mul_(weight)
    assert nodes.has_graph(view)
    assert search(view)[0] > 1


def test_a_gradients_graph_that_leads_back_to_its_leaf_ends() -> None:
    leaf = torch.ones(1, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the cycle, which the test ends
        (leaf**3).backward(create_graph=True)
    count, is_full = search((leaf * 2).sum())
    assert count > 3
    assert not is_full
    leaf.grad = None
