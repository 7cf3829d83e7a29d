"""Tab completion for the magics' subcommands, options and names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ipygpumem.scope import is_ownable

if TYPE_CHECKING:
    from ipygpumem.notebook.session import Session

_EXPERIMENT_OPTIONS = ["--keep", "--drop-imports", "--seed", "--report", "--note"]
_TENSOR_OPTIONS = ("--device", "--min", "--kind", "--by", "--top")
_TENSOR_VALUES = {
    "--kind": ["parameter", "gradient", "optimizer", "buffer", "other"],
    "--by": ["name", "shape", "kind", "cell", "device"],
    "--device": ["cpu", "cuda"],
}
_STYLES = ["full", "compact", "none"]


def complete_experiment(session: Session, line: str) -> list[str]:
    """Return what may follow on a line that begins with ``%experiment`` or ``%%experiment``."""
    words = line.split()
    done = words if line.endswith(" ") else words[:-1]
    if done[-1:] == ["--report"]:
        return _STYLES
    if done[-1:] == ["--keep"] or done[1:2] == ["keep"]:
        return sorted(name for name in session.namespace if is_ownable(name) and not name.startswith("_"))
    if done[1:2] == ["end"]:
        return [experiment.name for experiment in session.open]
    if line.startswith("%%") or done[1:2] == ["start"]:
        return _EXPERIMENT_OPTIONS
    return ["start", "end", "keep", "status"] if len(done) <= 1 else []


def complete_gpumem(session: Session, line: str) -> list[str]:
    """Return what may follow on a line that begins with ``%gpumem``."""
    words = line.split()
    done = words if line.endswith(" ") else words[:-1]
    if done[1:2] == ["tensors"]:
        return _TENSOR_VALUES.get(done[-1], list(_TENSOR_OPTIONS))
    return ["on", "off", "status", "preload", "free", "leaks", "tensors"] if len(done) <= 1 else []
