"""Memory of any kind that outlives its experiment is named, with its holder; in a real kernel."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.kernel import Kernel
from tests.steps import tidied_kernel, works

MIB = 1 << 20
DEFINE = """
import io, sys, functools
def texts(n): return [f"{i:0{1000}d}" for i in range(n)]
class Store: pass
class Corpus:
    def __init__(self, n): self.texts, self.names = texts(n), {i: f"{i:0500d}" for i in range(n)}
"""

shared_kernel, notebook = tidied_kernel(
    "import gc; gc.enable(); get_ipython().reset()", "%reload_ext ipygpumem", DEFINE
)

KINDS: dict[str, tuple[str, float]] = {
    "text": ("'x' * (16 << 20)", 16),
    "bytes": ("bytes(16 << 20)", 16),
    "a list of text": ("texts(16 << 10)", 16),
    "a dict of bytes": ("{i: bytes(1 << 20) for i in range(16)}", 16),
    "a dict of numbers": ("{i: i * 1.5 for i in range(200_000)}", 200_000 * 64 / MIB + 8),
    "lists of numbers": ("[[i, i + 1.5] for i in range(150_000)]", 150_000 * 128 / MIB),
    "a BytesIO": ("io.BytesIO(bytes(16 << 20))", 16),
    "a user's class": ("Corpus(10_000)", 15),
    "a pandas object column": (
        "__import__('pandas').DataFrame({'t': texts(16 << 10)}, dtype=object)",
        16,
    ),
    "a pandas str column": ("__import__('pandas').DataFrame({'t': texts(16 << 10)})", 16),
    "a polars frame": ("__import__('polars').DataFrame({'t': texts(16 << 10)})", 16),
    "a pyarrow table": ("__import__('pyarrow').table({'t': texts(16 << 10)})", 16),
    "a PIL image": ("__import__('PIL.Image').Image.new('RGB', (2048, 2048))", 16),
    "a SciPy matrix": ("__import__('scipy.sparse').sparse.eye(1 << 20, format='csr')", 16),
    "a scikit-learn forest": (
        "__import__('sklearn.ensemble').ensemble.RandomForestRegressor(20, n_jobs=1).fit(*"
        "(lambda r: (r.rand(4000, 2), r.rand(4000)))(__import__('numpy').random.RandomState(0)))",
        6.9,
    ),
}
PLACES = {
    "kept[-1]": ("kept = [b'old']", "kept.append({})"),
    'kept["new"]': ("kept = {'old': 1}", "kept['new'] = {}"),
    "store.content": ("store = Store(); store.content = None", "store.content = {}"),
    'history["runs"][0]': ("history = {'runs': []}", "history['runs'].append({})"),
}


def needed(kind: str) -> None:
    for library, word in (("pandas", "pandas"), ("polars", "polars"), ("pyarrow", "arrow"), ("PIL", "PIL")):
        if word in kind:
            pytest.importorskip(library)
    for library, word in (("scipy", "SciPy"), ("sklearn", "scikit")):
        if word in kind and importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")


def survivors(notebook: Kernel) -> list[tuple[str, int, str]]:
    found: list[tuple[str, int, str]] = notebook.value(
        "[(h.type_name, h.size_bytes, h.holder and h.holder.path) "
        "for h in __import__('ipygpumem').experiments()[-1].survivors]"
    )
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_that_outlives_its_experiment_is_named(notebook: Kernel, kind: str) -> None:
    needed(kind)
    make, mib = KINDS[kind]
    before, keep = list(PLACES.values())[list(KINDS).index(kind) % len(PLACES)]
    libraries = "".join(f"import {name}\n" for name in re.findall(r"__import__\('([\w.]+)'\)", make))
    works(notebook, f"{libraries}from array import array", before)
    works(notebook, "%%experiment a\n" + keep.format(make))
    found = survivors(notebook)
    assert sum(size for _, size, _ in found) >= 0.95 * mib * MIB, found
    assert sum(size for _, size, _ in found) <= 1.6 * mib * MIB, found
    assert all(path and path.startswith("notebook variable ") for _, _, path in found), found
