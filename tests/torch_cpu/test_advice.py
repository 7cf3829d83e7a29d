"""Each kind of advice is applied, and the saving measured; what only looks like it is left in peace."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import pytest

from ipygpumem.advising import advisor
from ipygpumem.advising.places import Scope
from ipygpumem.advising.records import Advised
from ipygpumem.units import KIB, MIB
from tests.advice_cases import CASES, NEAR_MISSES, Case

torch: Any = pytest.importorskip("torch", reason="these tests need torch, which comes with the extra 'torch'")

pytestmark = pytest.mark.usefixtures("others_out_of_sight")

IMPORTS = "import torch, numpy as np, pandas as pd\nfrom torch import nn\nD = 'cpu'\ntorch.manual_seed(0)\n"
ON_HOST = {name: case for name, case in CASES.items() if case.where in ("torch", "host")}
TOLERANCE = 0.05


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t) for name in ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks"]
    ] + [(name, ctypes.c_size_t) for name in ("fordblks", "keepcost")]


@pytest.fixture
def allocated() -> Any:
    """A function that returns the bytes that glibc has handed out: those of torch, NumPy and large objects."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("this C library does not say what is allocated (mallinfo2, glibc 2.33)")
    library.mallinfo2.restype = _Mallinfo

    def read() -> int:
        gc.collect()
        found = library.mallinfo2()
        return int(found.uordblks + found.hblkhd)

    return read


@pytest.fixture
def namespace() -> Iterator[dict[str, Any]]:
    """A script's names."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(IMPORTS, names)
    yield names
    names.clear()


def advised(names: dict[str, Any], least: int = 64 * KIB) -> Advised:
    return advisor.advise(Scope(names, {}), least)


def test_each_kind_of_advice_has_a_case() -> None:
    assert {case.finds for case in CASES.values()} == {kind.__name__ for kind in advisor.KINDS}


@pytest.mark.parametrize("case", ON_HOST.values(), ids=list(ON_HOST))
def test_advice_saves_what_it_promises(case: Case, namespace: dict[str, Any], allocated: Any) -> None:
    exec(case.setup, namespace)
    found = advised(namespace)
    (advice,) = [item for item in found.advice if item.code == case.code] or [[item.code for item in found.advice]]
    before = allocated()
    exec(advice.code, namespace)
    assert before - allocated() == pytest.approx(advice.saves_bytes, rel=TOLERANCE)
    assert advice.saves_bytes >= MIB
    assert case.code not in [item.code for item in advised(namespace).advice]


@pytest.mark.parametrize("setup", NEAR_MISSES.values(), ids=list(NEAR_MISSES))
def test_what_only_looks_like_it_is_left_in_peace(setup: str, namespace: dict[str, Any]) -> None:
    exec(setup, namespace)
    assert advised(namespace).advice == ()
