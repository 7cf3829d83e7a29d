"""The magics and the Python API in a real kernel, as a user types them."""

import re

import IPython
import pytest

from ipygpumem.magics.gpumem import RELEASED
from ipygpumem.shell.config import IPyGpuMem
from tests.kernel import Kernel
from tests.steps import kernel_with

MIB = 1 << 20


shared = kernel_with(
    "%load_ext ipygpumem\nimport ipygpumem, mmap\ndef block(mib): return bytearray(b'x') * (mib << 20)"
)
"""Each of the tests below leaves it as it found it."""


def test_status_has_words_for_each_value_of_release_frames() -> None:
    assert RELEASED.keys() == set(IPyGpuMem.class_traits()["release_frames"].values)


def test_free_gives_back_garbage_and_what_stored_tracebacks_hold(shared: Kernel) -> None:
    shared.run("def fail():\n    pinned = block(96)\n    raise ValueError('kept for %debug')\nfail()")
    shared.run("loop = [block(64)]; loop.append(loop); del loop")
    before = shared.value("ipygpumem.last().usages[0].after_bytes")
    (report,) = shared.run("%gpumem free").reports("note")
    # The loop may be collected by Python itself, at any moment.
    assert re.search(r"tracebacks \(RAM (96|160) MiB\)", report)
    assert before - shared.value("ipygpumem.last().usages[0].after_bytes") > 90 * MIB


def test_the_cost_of_our_own_look_at_the_names_is_not_the_experiments_peak(shared: Kernel) -> None:
    reply = shared.run("%%experiment heavy\ncorpus = [[i] for i in range(300_000)]")
    assert reply.reports("experiment")
    cell, whole = shared.value(
        "[record.usages[0].peak_delta_bytes for record in (ipygpumem.last(), ipygpumem.experiments()[-1])]"
    )
    assert whole == pytest.approx(cell, abs=2 * MIB)


def test_nested_blocks_that_an_error_leaves_tell_of_it_once(shared: Kernel) -> None:
    shared.run("import numpy")
    reply = shared.run(
        "def fail():\n    held = numpy.ones(1 << 20)\n    numpy.ones(1 << 50)\n"
        "with ipygpumem.experiment('outer'):\n    with ipygpumem.experiment('inner'):\n        fail()"
    )
    (report,) = reply.reports("recovery")
    assert report.count("out of memory") == 1
    assert "held" in report


def test_to_close_a_generator_in_a_block_is_no_failure(shared: Kernel) -> None:
    shared.run("def items():\n    with ipygpumem.experiment('closed'): yield 1")
    shared.run("rest = items(); next(rest)")
    (report,) = shared.run("del rest").reports("experiment")
    assert "traceback" not in report


def test_an_error_after_one_that_was_caught_keeps_its_frames_for_debug(shared: Kernel) -> None:
    shared.run("import numpy, sys")
    shared.run(
        "def fail():\n    numpy.ones(1 << 50)\ndef other():\n    wanted = 5\n    raise ValueError\n"
        "try:\n    with ipygpumem.experiment('caught'):\n        fail()\nexcept MemoryError: pass\nother()"
    )
    frames = "[f.f_locals.get('wanted') for f, _ in __import__('traceback').walk_tb(sys.last_traceback)][-1]"
    assert shared.value(frames) == 5


@pytest.mark.skipif(IPython.version_info < (8, 6), reason="matchers of one's own are new in IPython 8.6")
def test_jedi_offers_no_names_of_python_beside_our_options(shared: Kernel) -> None:
    shared.run(
        "from IPython.core.completer import provisionalcompleter\n"
        "def offered(line):\n    with provisionalcompleter():\n"
        "        return [item.text for item in get_ipython().Completer.completions(line, len(line))]"
    )
    assert shared.value("offered('%gpumem tensors --d')") == ["--device"]
    assert shared.value("offered('%%experiment a --ke')") == ["--keep"]
    assert "print" in shared.value("offered('pri')")
