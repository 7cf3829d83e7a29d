"""The tools that are compared, and how each is switched on, off, and asked for what it saw."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata, util


@dataclass(frozen=True)
class Tool:
    """One way of measuring cells. The expressions speak of the last cell that was run while the
    tool was on.
    """

    name: str
    package: str
    on: str
    """The cell that switches the tool on."""
    off: str
    """The cell that switches it off."""
    peak: str
    """An expression: how far the cell rose above its start, in bytes."""
    kept: str
    """An expression: what the cell kept, in bytes."""
    load_in_shell: str
    """Statements that switch the tool on in a plain IPython shell named ``shell``."""

    @property
    def installed(self) -> bool:
        """Return True if the package can be imported here."""
        return util.find_spec(self.package) is not None

    @property
    def title(self) -> str:
        """The name with the version."""
        if not self.installed:
            return self.name
        return f"{self.name} {metadata.version(self.name)}"


_CPU = "next(usage for usage in __import__('ipygpumem').last().usages if usage.device == 'cpu')"

OURS = Tool(
    name="ipygpumem",
    package="ipygpumem",
    on="%load_ext ipygpumem",
    off="%unload_ext ipygpumem",
    peak=f"{_CPU}.peak_delta_bytes",
    kept=f"{_CPU}.delta_bytes",
    load_in_shell="shell.run_line_magic('load_ext', 'ipygpumem')",
)

PEER = Tool(
    name="ipyexperiments",
    package="ipyexperiments",
    on="from ipyexperiments import IPyExperimentsCPU\nexp = IPyExperimentsCPU()",
    off="exp.finish();",
    # Its peak counts from the higher of start and end; ours, and this expression, from the start.
    peak="max(exp.cl.data.cpu.used_delta, 0) + exp.cl.data.cpu.peaked_delta",
    kept="exp.cl.data.cpu.used_delta",
    # Outside a kernel only its cell logger works, which is the part that reports cells.
    load_in_shell="from ipyexperiments import IPyExperimentsCPU; exp = IPyExperimentsCPU(exp_enable=False)",  # noqa: E501
)

TOOLS = (OURS, PEER)


def installed_tools() -> list[Tool]:
    """Return the tools that can be measured here."""
    return [tool for tool in TOOLS if tool.installed]
