"""The tests that a change of one room of the package needs first: ``make quick ROOM=scope``.

Run as ``python -m tests.rooms ROOM``, which prints their files. With lint they take at most 90 s on
two cores.
"""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).parent
ALWAYS = ("test_language", "test_house", "test_session", "test_extension")
"""Tests of each change: plain English, imports, and the life of a cell."""
ROOMS = {
    "api": ("test_helpers", "test_traces", "test_budget", "test_autofit", "test_docs"),
    "errors": ("recovery/test_classify", "bad_input/test_arguments"),
    "estimating": (
        "test_estimate_refusals",
        "torch_cpu/test_estimate",
        "torch_cpu/test_estimate_memory",
        "torch_cpu/test_estimate_rollback",
        "torch_cpu/test_estimate_usual_code",
    ),
    "extras": (
        "test_expect",
        "integrations/test_figures",
        "test_guard",
        "test_guard_refusals",
        "test_isolate",
        "test_lines",
        "test_panel",
        "test_peak",
        "test_recorder",
        "test_tracker",
    ),
    "failures": ("test_faults", "test_helpers", "test_signals"),
    "features": ("test_completion", "test_extension", "bad_input/test_arguments"),
    "fitting": ("test_autofit", "test_budget", "torch_cpu/test_fit"),
    "heap": (
        "integrations/test_uncounted_memory",
        "test_certainty",
        "test_contents",
        "test_garbage",
        "test_heap",
        "test_mapped",
        "test_random_graphs",
        "test_remembered",
        "test_structs",
        "test_views",
        "test_weak_references",
    ),
    "interrupts": ("test_interrupts", "test_signals"),
    "introspect": ("bad_input/test_hostile", "test_attribute_dicts"),
    "notebook": ("test_first_hour", "torch_cpu/test_estimate_rollback"),
    "inventory": (
        "smoke/test_tensors_magic",
        "test_certainty",
        "test_growth",
        "test_host",
        "test_inventory",
        "test_status",
        "test_top",
        "test_total",
    ),
    "magics": (
        "bad_input/test_arguments",
        "test_completion",
        "test_docs",
        "test_history",
        "test_reports",
    ),
    "meter": ("test_causes", "test_meter", "test_traces"),
    "probes": ("test_host", "test_nvml", "test_other_kernels", "test_outside", "test_pools"),
    "reading": ("test_reports", "test_export", "test_history"),
    "reclaim": (
        "recovery/test_alive",
        "recovery/test_classify",
        "recovery/test_errors",
        "recovery/test_kept_errors",
        "test_free_heap",
        "test_printed",
        "test_reclaim",
    ),
    "records": ("test_export", "test_history", "test_reconcile", "test_reports"),
    "report": (
        "integrations/test_figures",
        "test_export",
        "test_reports",
        "test_screen",
        "test_status",
    ),
    "scope": ("bad_input/test_odd_cells", "smoke/test_scopes", "test_exact_scopes"),
    "shell": (
        "smoke/test_cells",
        "smoke/test_young_experiments",
        "test_faults",
        "test_printed",
        "test_trends",
    ),
    "units": ("test_units", "bad_input/test_arguments"),
}
"""Files of tests by room. The whole behaviour of a room has more tests: ``make test``."""


def files(room: str) -> list[str]:
    """Return the paths of the tests of a room."""
    names = sorted({*ALWAYS, *ROOMS[room]})
    return [f"tests/{name}.py" for name in names]


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0] not in ROOMS:
        print(f"which room? ROOM=NAME, one of: {', '.join(ROOMS)}", file=sys.stderr)
        return 2
    print(*files(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
