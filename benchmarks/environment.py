"""Describes the machine, the date and the versions of the figures."""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata, util
from pathlib import Path

from benchmarks.report import NOT_INSTALLED

_PACKAGES = (
    "IPython",
    "ipykernel",
    "jupyter_client",
    "ipygpumem",
    "ipyexperiments",
    "numpy",
    "psutil",
    "torch",
)


def describe() -> list[str]:
    """Return the date, the machine and the versions, one line each."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = [f"Python {platform.python_version()}"]
    versions += [f"{name} {_version(name)}" for name in _PACKAGES]
    return [
        f"Date: {today}",
        f"Machine: {_processor()}, {os.cpu_count()} CPUs, {memory:.0f} GiB of RAM",
        f"Kernel: {platform.system()} {platform.release()}",
        f"Versions: {', '.join(versions)}",
    ]


def describe_as_list() -> str:
    """Return the date, the machine and the versions as a Markdown list."""
    return "\n".join(f"- {fact}" for fact in describe())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        if util.find_spec(package):
            return "not installed, from its folder"
        return NOT_INSTALLED


def _processor() -> str:
    """Return the processor's model, or its architecture where Linux does not name the model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
