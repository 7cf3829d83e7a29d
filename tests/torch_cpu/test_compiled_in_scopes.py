"""What torch.compile keeps among the notebook's names is torch's: no scope deletes it."""

from __future__ import annotations

import pytest

from tests.kernel import Kernel
from tests.steps import kernel_with, works

pytest.importorskip("torch")
shared = kernel_with("%load_ext ipygpumem\nimport gc, torch, weakref")
COMPILED = "sum(name.startswith('__compiled_fn') for name in globals())"


def test_a_function_that_an_experiment_has_compiled_is_not_compiled_again(shared: Kernel) -> None:
    works(shared, "@torch.compile(backend='eager')\ndef double(x): return x * 2")
    (text,) = works(shared, "%%experiment a\ndouble(torch.ones(3))").reports("experiment")
    assert "deleted" not in text
    compiled = shared.value(COMPILED)
    assert compiled > 0
    works(shared, "double(torch.ones(3))")
    assert shared.value(COMPILED) == compiled


def test_a_model_that_was_compiled_in_an_experiment_dies_with_it_and_torch_complains_of_nothing(shared: Kernel) -> None:
    works(
        shared,
        "%%experiment a --keep gone\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(512, 512)\n"
        "    def forward(self, x):\n"
        "        y = self.layer(x)\n"
        "        torch._dynamo.graph_break()\n"
        "        return y.relu().sum()\n"
        "net = Net()\n"
        "torch.compile(net, backend='eager')(torch.ones(2, 512)).backward()\n"
        "gone = weakref.ref(net.layer.weight)\n"
        "__mine = 1",
    )
    assert shared.value("gone() is None, '__mine' in globals()") == (True, False)
    assert works(shared, "gc.collect(); torch._dynamo.reset(); gc.collect();").stderr == ""
