"""What an estimate says of code that reaches beyond its tensors: files, processes, the network, the screen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ipygpumem
from ipygpumem.estimating.effects import effects_of

IMPORTS = """
import io, json, os, pickle, shutil, subprocess, sqlite3, tempfile
import os.path as path
import numpy as np
import torch
from pathlib import Path
from pickle import dump
"""
REAL = "only tensors are fake; calls of these run for real: "


def told(body: str) -> list[str]:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(IMPORTS, space)
    return effects_of(compile(body, "cell", "exec"), (space,))


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("np.save('x.npy', [1])", "np.save"),
        ("np.zeros(3).tofile('x')", "tofile"),
        ("pickle.dump(1, f)", "pickle.dump"),
        ("os.makedirs('runs', exist_ok=True)", "os.makedirs"),
        ("os.remove('x')", "os.remove"),
        ("subprocess.run(['ls'])", "subprocess.run"),
        ("Path('x').mkdir()", "mkdir"),
        ("Path('x').write_text('y')", "write_text"),
        ("open('x', 'w').write('y')", "open"),
        ("frame.to_parquet('x')", "frame.to_parquet"),
        ("print(1)", "print"),
        ("torch.load('x.pt')", "torch.load"),
        ("def f():\n    np.save('x', 1)\nf()", "np.save"),
        ("[np.save(str(n), n) for n in range(3)]", "np.save"),
        ("import numpy\nnumpy.save('x', 1)", "numpy.save"),
    ],
)
def test_a_call_that_reaches_out_is_named(body: str, name: str) -> None:
    (note,) = told(body)
    assert name in note.partition("run for real: ")[2].split(", ")


@pytest.mark.parametrize(
    "body",
    [
        "torch.save({}, 'x')",
        "'text'.replace('a', 'b')",
        "path.join('a', 'b'), os.getpid(), os.environ.get('x'), os.path.exists('x')",
        "json.dumps({}), pickle.dumps({}), io.BytesIO()",
        "x = torch.ones(3).sum()",
    ],
)
def test_what_reaches_nothing_is_not_named(body: str) -> None:
    assert told(body) == []


def test_functions_of_users_modules_are_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "effectsmodule.py").write_text("import numpy\ndef keep(x):\n    numpy.save('x', x)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import effectsmodule  # type: ignore[import-not-found]  # made above

    assert effects_of(compile("m.keep(3)", "cell", "exec"), ({"m": effectsmodule},)) == [REAL + "numpy.save"]


def test_a_users_functions_effects_are_real_and_named(tmp_path: Path) -> None:
    def train(x: torch.Tensor, rounds: int) -> None:
        np.save(tmp_path / f"{rounds}.npy", np.ones(3))
        if rounds:
            train(x * 2, rounds - 1)

    assert ipygpumem.estimate(train, torch.ones(8), 2).notes == (REAL + "np.save",)
    assert len(list(tmp_path.iterdir())) == 3


class Counter:
    """An iterator that is no more than its attributes: code gets a copy."""

    def __init__(self) -> None:
        self.count = 0

    def __next__(self) -> int:
        self.count += 1
        return self.count


def test_iterators_that_code_consumes_are_named(tmp_path: Path) -> None:
    batches, numbers, counter = iter([torch.ones(3)]), (n for n in range(3)), Counter()
    path = tmp_path / "rows"
    path.write_text("a\nb\n")
    with path.open() as rows:

        def step(given: Any) -> None:
            def inner() -> Any:
                return next(numbers), [0 for _ in rows]

            inner(), next(given), next(batches), next(counter)

        found = ipygpumem.estimate(step, zip([1], [2], strict=True))
    assert found.notes == ("items that the code takes from these iterators are gone: a zip, batches, numbers, rows",)
    assert counter.count == 0
    loader = iter(torch.utils.data.DataLoader(torch.ones(4, 2)))
    assert "loader" in ipygpumem.estimate(lambda: next(loader)).notes[0]
