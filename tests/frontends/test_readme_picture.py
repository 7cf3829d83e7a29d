"""The picture at the top of README.md: a window of JupyterLab after an experiment and an out-of-memory error."""

import pytest

from tests.frontends.lab import Notebook
from tests.frontends.looks import Pictures, misfits
from tests.notebooks import notebook

pytestmark = [pytest.mark.frontends, pytest.mark.timeout(600)]

CELLS = (
    "%load_ext ipygpumem",
    "import torch\nfrom torch import nn\n\nimages, labels = torch.rand(2048, 3, 128, 128), torch.randint(10, (2048,))",
    """%%experiment baseline --keep loss --note lr=1e-3 bs=512
model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 128 * 128, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for batch, truth in zip(images.split(512), labels.split(512)):
    loss = nn.functional.cross_entropy(model(batch), truth)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
loss = loss.item()""",
    """def similarity(images):
    flat = images.flatten(1) - images.mean()
    return (flat[:, None] - flat).square().sum(2)

similarity(images)""",
)


def test_the_window_of_the_readme(lab: Notebook, pictures: Pictures) -> None:
    lab.page.set_viewport_size({"width": 1000, "height": 1090})
    lab.open(notebook(*CELLS), "training.ipynb")
    lab.command("application:toggle-left-area")
    lab.run(*range(len(CELLS)), seconds=200)
    experiment, failure = lab.reports(2).last.inner_text(), lab.reports(3).last.inner_text()
    assert "deleted: model, optimizer, batch, truth" in experiment
    assert "flat" in failure
    assert misfits(lab.reports(2).last) == misfits(lab.reports(3).last) == []
    lab.cell(2).evaluate("cell => cell.scrollIntoView({block: 'start'})")
    pictures.take(lab.page.locator("body > .lm-Widget, #main").first, "report")
