"""All scenarios."""

from __future__ import annotations

from tests.torture.errors import ERRORS
from tests.torture.libraries import LIBRARIES, TORCH
from tests.torture.magics import MAGICS
from tests.torture.names import NAMES
from tests.torture.tasks import TASKS

GROUPS = {
    "Names and references": NAMES,
    "Errors": ERRORS,
    "Errors elsewhere": TASKS,
    "Magics and warnings": MAGICS,
    "torch": TORCH,
    "matplotlib and pandas": LIBRARIES,
}
SCENARIOS = tuple(scenario for group in GROUPS.values() for scenario in group)
