"""Checks on values go the way on which all is well, and an error after a guess says that there was one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import ipygpumem
from ipygpumem.errors import EstimateError, GpuMemError
from tests.kernel import Kernel
from tests.smoke.steps import run
from tests.torch_cpu.test_estimate_usual_code import estimated

FINE = [
    "assert torch.isfinite(x).all()",
    "if not torch.isfinite(x.sum()):\n    raise FloatingPointError",
    "assert (x >= 0).all() and x.isfinite().all().cpu().item()",
    "if torch.isnan(x).any() or x.isinf().any():\n    raise ValueError",
    "if torch.isnan(x).sum() > 0 or x.isnan().sum().item():\n    raise ValueError",
    "if (~torch.isfinite(x)).any() or (x != x).any():\n    raise ValueError",
    "assert not torch.logical_or(x.isnan(), x.isinf()).any()",
    "bad = torch.isnan(x).any()\nbad |= torch.isinf(x).any()\nassert torch.logical_not(bad)",
    "assert torch.allclose(x, x + 1) and torch.equal(x, x + 1)",
    "assert x.sum() > 0 and x.max() < 3, 'message'",
    "if (x > 0).any() or not torch.equal(x, y):\n    raise ValueError",
    "assert any([(x > 0).all()]) and not (x < 0).any()",
    "def positive():\n    if (x > 0).all():\n        return 3\n    raise ValueError\npositive()",
    "assert not any(torch.isnan(x).flatten().tolist())",
    "nn.utils.clip_grad_norm_([nn.Parameter(x)], 1.0, error_if_nonfinite=True)",
    "assert torch.distributions.Categorical(logits=model(x)).sample().shape == (64,)",
    "d = torch.distributions\nz = d.Categorical(logits=x)\nz.log_prob(z.sample()).sum() + z.entropy().sum()",
    "d = torch.distributions\nz = d.Normal(x, x.exp())\nz.log_prob(z.rsample()).mean() + z.cdf(x).sum()",
    "d = torch.distributions\nz = d.Independent(d.Laplace(x, x), 1)\nd.kl_divergence(z, z) + z.log_prob(z.sample())",
    "d = torch.distributions\nz = d.MultivariateNormal(x[0], torch.eye(256))\nz.log_prob(z.rsample())",
    "d = torch.distributions\nz = d.Beta(x, x)\nz.log_prob(z.rsample()) + d.Gamma(x, x).rsample()",
]


@pytest.mark.parametrize("body", FINE)
def test_a_check_on_values_passes(body: str, tmp_path: Path) -> None:
    assert estimated(f"torch.empty(3)\n{body}", tmp_path, device=None).peak_bytes > 0


def test_a_loop_that_ends_early_is_taken_to_go_on(tmp_path: Path) -> None:
    body = "kept = []\nfor n in range(8):\n    kept.append(torch.ones(256))\n    if (x == n).all():\n        break"
    assert estimated(body, tmp_path, device=None).peak_bytes >= 8 * 1024


def test_a_list_of_values_is_a_guess(tmp_path: Path) -> None:
    assert any("tolist" in line for line in estimated("(x * 2).tolist()", tmp_path).guesses)


SAVED = "from tempfile import mkdtemp\nf = {file}\ntorch.save(x, f)\ntorch.load(f)"
UNFOLLOWED = {
    "from torch.nn.attention.flex_attention import flex_attention\nq = x[None, None]\n"
    "flex_attention(q, q, q)": "flex_attention",
    "import torch.distributed as d\nd.init_process_group('gloo', 'tcp://127.0.0.1:0', rank=0, world_size=1)\n"
    "nn.parallel.DistributedDataParallel(model)": "reads a tensor",
    "\n\ng = torch.Generator(device='cuda')": "a generator",
    SAVED.format(file="mkdtemp() + '/x.pt'"): "torch.save wrote nothing",
    SAVED.format(file="io.BytesIO()"): "torch.save wrote nothing",
}


@pytest.mark.parametrize(("body", "told"), UNFOLLOWED.items())
def test_what_torch_itself_cannot_do_without_values_is_refused_by_its_line(
    body: str, told: str, tmp_path: Path
) -> None:
    if "gloo" in body and not torch.distributed.is_available():
        pytest.skip("this torch has no processes")
    with pytest.raises(EstimateError, match=told) as caught:
        estimated(body, tmp_path)
    assert str(caught.value).endswith(body.splitlines()[-1])


def test_an_error_after_a_guess_says_which_lines_got_one(kernel: Kernel) -> None:
    assert run(kernel, "import torch\nx = torch.ones(3)").status == "ok"
    reply = run(kernel, "%%estimate\nloss = x.sum()\nif loss.item() < 2:\n    raise ValueError('small')\n")
    assert reply.error == "ValueError"
    assert "guess" in reply.stderr
    assert "line 3: if loss.item() < 2:" in reply.stderr
    reply = run(kernel, "%%estimate\nx.sum()\nraise ValueError('small')\n")
    assert (reply.error, reply.stderr) == ("ValueError", "")


def test_a_syntax_error_is_shown_as_in_a_plain_cell(kernel: Kernel) -> None:
    for body in ("x = (]\n", "if x:\ny = 2\n", "y = 2\nreturn 3\n", "exec('z = (')\n"):
        expected, found = run(kernel, f"#\n{body}"), run(kernel, f"%%estimate\n{body}")
        assert (found.status, found.error) == ("error", expected.error), body
        assert "ipygpumem" not in found.traceback, body
        shown, plain = (re.sub(r"\x1b\[[\d;]*m|Cell.*?In *\[\d+\]", "", reply.traceback) for reply in (found, expected))
        assert shown.splitlines()[-4:] == plain.splitlines()[-4:], body


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device_memory": -5}, "and not -5"),
        ({"device_memory": 0.5}, "and not 0.5"),
        ({"device_memory": True}, "and not bool"),
        ({"device_memory": [1]}, "and not list"),
        ({"timeout": -1}, "seconds above zero"),
        ({"timeout": "x"}, "seconds above zero"),
    ],
)
def test_a_wrong_size_or_time_is_said_before_anything_runs(options: dict[str, Any], words: str) -> None:
    ran: list[int] = []
    with pytest.raises(GpuMemError, match=words):
        ipygpumem.estimate(ran.append, 1, **options)
    assert ran == []
