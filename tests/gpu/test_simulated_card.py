"""The simulated card behaves as a real one: captures, other processes."""

import pytest

from ipygpumem.units import GIB
from tests.gpu.support import Card, other_process, script

pytestmark = pytest.mark.simulated

BEGIN = """
import ctypes, json, os
import torch
def error_of(f):
    try:
        f()
    except RuntimeError as error:
        return str(error).splitlines()[0].removeprefix("CUDA error: ")
x = torch.ones(1 << 20, device="cuda")
"""


def test_a_synchronisation_next_to_a_capture_ends_it() -> None:
    """A synchronisation beside a capture ends it with CUDA's error, and the next capture works."""
    code = """
wait = lambda: torch.cuda.current_stream().synchronize()
def capture(f):
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x + 1
        f()
print(json.dumps([error_of(lambda: capture(f)) for f in (torch.cuda.synchronize, wait, x.zero_)]))
"""
    invalidated = "operation failed due to a previous error during capture"
    assert script(BEGIN + code) == [invalidated, invalidated, None]


def test_a_process_that_is_killed(card: Card) -> None:
    """The memory of a process is free once it is killed, before its parent has waited for it."""
    before = card.settle()
    with other_process(1024) as process:
        assert card.memory.used - before > GIB
        process.kill()
        assert card.settle() == before


FORK = """
import json, os
import torch

def works_in_child():
    child = os.fork()
    if not child:
        try:
            torch.ones(1, device="cuda")
        except RuntimeError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0

before = works_in_child()
torch.ones(1, device="cuda")
print(json.dumps([before, works_in_child()]))
"""


def test_a_fork_ends_cuda_only_where_it_was_used() -> None:
    """A child uses a card if its parent has only imported torch, and cannot if the parent has used
    one.
    """
    assert script(FORK, env={}) == [True, False]
