"""Tensors that nobody expects, in scopes and after an out-of-memory error."""

from __future__ import annotations

import pytest

from tests.hostile import SOURCE
from tests.kernel import Kernel
from tests.steps import recovery, works

pytest.importorskip("torch", reason="these tests need torch, which comes with the extra 'torch'")


ZOO = """
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrize
import warnings; warnings.simplefilter("ignore")
zoo = {
    "strided_nested": torch.nested.nested_tensor([torch.ones(3), torch.ones(5)]),
    "jagged_nested": torch.nested.nested_tensor([torch.ones(3), torch.ones(5)], layout=torch.jagged),
    "sparse": torch.eye(100).to_sparse(),
    "csr": torch.eye(100).to_sparse_csr(),
    "quantized": torch.quantize_per_tensor(torch.ones(100), 0.1, 0, torch.qint8),
    "meta": torch.empty(1 << 30, device="meta"),
    "fake": FakeTensorMode().from_tensor(torch.ones(100)),
    "lazy": nn.LazyLinear(10),
    "expanded": torch.ones(1).expand(1 << 20),
    "conjugate": torch.ones(10, dtype=torch.complex64).conj(),
    "parameter": nn.Parameter(torch.ones(100)),
    "parametrized": parametrize.register_parametrization(nn.Linear(3, 3), "weight", nn.Identity()),
    "storage": torch.ones(100).untyped_storage(),
    "graph": (torch.ones(100, requires_grad=True) * 2).sum(),
    "packed": nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]),
    "compiled": torch.compile(nn.Linear(2, 2)),
    "scripted": torch.jit.script(nn.Linear(2, 2)),
    "mkldnn": torch.ones(10).to_mkldnn() if torch.backends.mkldnn.is_available() else None,
    "freed": torch.ones(100),
}
zoo["freed"].untyped_storage().resize_(0)
"""


def test_every_kind_of_tensor_can_be_in_a_scope_that_ends(notebook: Kernel) -> None:
    works(notebook, "x = 'old'\nleaked = []", "%experiment start a")
    works(notebook, "x = 'new'\n" + ZOO, timeout=600)
    reply = works(notebook, "locals().update(zoo); leaked.append(zoo)", "%experiment status", "%experiment end")
    assert len(reply.reports("experiment")) == 1
    assert notebook.value("x") == "old"
    assert notebook.value("[name for name in leaked[0] if name in globals()]") == []
    works(notebook, "leaked.clear()")


@pytest.mark.parametrize("kind", ["function", "None", "strides", "sizes"])
def test_no_code_of_a_tensor_subclass_runs_at_exit_in_status_or_after_an_oom(notebook: Kernel, kind: str) -> None:
    works(notebook, SOURCE + "\nwatched.clear()", "old = tensors()[KIND]\nleaked = []".replace("KIND", repr(kind)))
    works(notebook, "%experiment start a")
    works(notebook, f"tensor = tensors()[{kind!r}]; box = [tensors()[{kind!r}]]; old = 1; leaked.append(tensor)")
    works(notebook, "%experiment status", "%gpumem status", "%experiment end")
    assert notebook.value("touched") == []
    assert notebook.value("'tensor' in globals() or 'box' in globals() or type(old) is int") is False
    recovery(
        notebook,
        f"def f():\n    tensor = tensors()[{kind!r}]; watch(tensor=tensor)\n"
        "    error = MemoryError('no'); error.tensor = tensor\n    raise error\nf()",
    )
    assert notebook.value("touched") == []
    assert notebook.value("alive()") == []
