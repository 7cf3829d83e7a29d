"""The tests that a change of one room of the package needs first: ``make quick ROOM=scope``.

Run as ``python -m tests.rooms ROOM``, which prints their files. With lint they take at most 90 s on
two cores. ``python -m tests.rooms ROOM --all`` also prints the files that take longer.
"""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).parent
ALWAYS = ("test_language", "test_house", "test_session", "test_extension")
"""Tests of each change: plain English, imports, and the life of a cell."""
ROOMS = {
    "api": (
        "bad_input/test_python_calls",
        "test_autofit",
        "test_budget",
        "test_docs",
        "test_guarded_blocks",
        "test_reservations",
        "test_traces",
    ),
    "errors": (
        "bad_input/test_arguments",
        "bad_input/test_python_calls",
        "recovery/test_classify",
    ),
    "estimating": (
        "test_estimate_refusals",
        "torch_cpu/test_estimate",
        "torch_cpu/test_estimate_memory",
        "torch_cpu/test_estimate_places",
        "torch_cpu/test_estimate_rollback",
        "torch_cpu/test_estimate_usual_code",
        "torch_cpu/test_result_cache",
    ),
    "extras": (
        "test_expect",
        "integrations/test_figures",
        "test_guard",
        "test_guard_refusals",
        "test_isolate",
        "test_memlines",
        "test_panel",
        "test_peak",
        "test_recorder",
        "test_tracker",
    ),
    "extras/cluster": ("test_clusters",),
    "extras/fit": ("integrations/test_fit",),
    "extras/trainers": ("integrations/test_trainers",),
    "failures": ("test_faults", "test_guarded_blocks", "test_signals"),
    "features": ("test_completion", "test_extension", "bad_input/test_arguments"),
    "fitting": ("test_autofit", "test_budget", "test_reservations", "torch_cpu/test_fit"),
    "heap": (
        "integrations/test_uncounted_memory",
        "test_bulk",
        "test_certainty",
        "test_garbage",
        "test_heap",
        "test_mapped",
        "test_random_graphs",
        "test_remembered",
        "test_slices",
        "test_small_views",
        "test_structs",
        "test_weak_references",
    ),
    "heap/holders": (
        "test_bulk",
        "test_hostile_holders",
        "test_lines_that_free",
        "test_kept_objects",
        "test_limits_of_searches",
        "test_unreached",
    ),
    "heap/paths": ("test_hostile_holders", "test_lines_that_free", "test_limits_of_searches"),
    "interrupts": ("test_interrupts", "test_signals"),
    "introspect": ("bad_input/test_hostile", "test_attribute_dicts"),
    "notebook": ("test_first_lines", "test_messages", "torch_cpu/test_estimate_rollback"),
    "oom_texts": ("recovery/test_classify", "test_autofit", "test_guard_refusals"),
    "inventory": (
        "smoke/test_tensors_magic",
        "test_causes",
        "test_certainty",
        "test_contents",
        "test_free_heap",
        "test_host",
        "test_inventory",
        "test_kept_objects",
        "test_limits_of_searches",
        "test_lines_that_free",
        "test_status",
        "test_top",
        "test_total",
        "test_unreached",
    ),
    "magics": (
        "bad_input/test_arguments",
        "test_completion",
        "test_docs",
        "test_history",
        "test_reports",
    ),
    "meter": ("test_meter", "test_traces"),
    "probes": (
        "test_device_memory",
        "test_host",
        "test_nvml",
        "test_other_kernels",
        "test_outside",
        "test_pools",
    ),
    "reading": ("test_reports", "test_export", "test_history"),
    "reclaim": (
        "recovery/test_alive",
        "recovery/test_classify",
        "recovery/test_errors",
        "recovery/test_kept_errors",
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
        "test_advised_lines",
        "test_faults",
        "test_printed",
        "test_trends",
    ),
    "units": ("test_units", "bad_input/test_arguments"),
}
"""Files of tests by room or folder of a room. The whole behaviour of a room has more tests, in
LONGER.
"""
LONGER = {
    "api": ("torch_cpu/test_freeing", "torch_cpu/test_loggers"),
    "estimating": ("torch_cpu/test_estimate_doubts",),
    "extras": ("test_guard_threads", "torch_cpu/test_peak", "torch_cpu/test_tracker"),
    "extras/fit": (
        "torch_cpu/test_fit",
        "torch_cpu/test_fit_losses",
        "torch_cpu/test_fit_models",
        "torch_cpu/test_fit_perhaps",
    ),
    "heap": (
        "test_passing",
        "test_sizes",
        "torch_cpu/test_certainty",
        "torch_cpu/test_long_graphs",
        "torch_cpu/test_mapped",
        "torch_cpu/test_nodes",
        "torch_cpu/test_small_views",
    ),
    "heap/holders": (
        "test_agreement",
        "test_holders",
        "test_joint_lines",
        "test_remedies",
        "torch_cpu/test_holders",
        "torch_cpu/test_why",
    ),
    "heap/paths": (
        "test_agreement",
        "test_holders",
        "test_joint_lines",
        "test_kept_by_registries",
        "test_leaked_frames",
        "test_leaked_parameters",
        "test_leaks_in_containers",
        "test_leaks_in_older_objects",
        "test_lines_spare_older_data",
        "test_older_records",
        "test_remedies",
        "torch_cpu/test_holders",
    ),
    "inventory": (
        "test_agreement",
        "test_dropped_data",
        "test_estimators",
        "test_growth",
        "test_innocent_objects",
        "test_kept_by_registries",
        "test_leaked_figures",
        "test_leaked_frames",
        "test_leaked_parameters",
        "test_leaked_tasks",
        "test_leaks_in_containers",
        "test_leaks_in_older_objects",
        "test_lines_spare_older_data",
        "test_named_notebooks",
        "test_objects_of_each_kind",
        "test_random_leaks",
        "test_random_lines",
        "test_reported_objects",
        "test_trends",
        "torch_cpu/test_inventory",
        "torch_cpu/test_retained",
    ),
    "probes": ("test_ended_children", "test_job_processes"),
    "reclaim": ("recovery/test_allowance", "torch_cpu/test_recovery"),
    "report": ("test_shared_pages",),
    "scope": ("test_scope_threads", "torch_cpu/test_old_memory", "torch_cpu/test_scopes"),
    "shell": (
        "smoke/test_any_memory",
        "smoke/test_leaks",
        "test_experiments",
        "torch_cpu/test_young_experiments",
    ),
}
"""Files of tests by room that take too long for a quick run; ``make test`` runs all of them."""
OF_THE_WHOLE = (
    "test_costs",
    "test_demo",
    "test_distribution",
    "test_harness",
    "test_heap_passes",
    "test_public_reports",
    "test_sharing_page",
    "test_tutorials",
    "test_without_posix",
    "torch_cpu/test_doctests",
    "torture/test_torture",
)
"""Files of tests of all rooms together, of the documentation and of the tools."""
FOLDERS_OF_THE_WHOLE = ("frontends", "gpu")
"""Folders of tests that need a browser or a card: ``make frontends``, ``make gpu-sim``."""


def files(room: str, *, has_longer: bool = False) -> list[str]:
    """Return the paths of the tests of a room."""
    names = {*ALWAYS, *ROOMS[room]}
    if has_longer:
        names.update(LONGER.get(room, ()))
    return [f"tests/{name}.py" for name in sorted(names)]


def main(arguments: list[str]) -> int:
    room, *options = arguments or [""]
    if room not in ROOMS or options not in ([], ["--all"]):
        print(f"which room? ROOM=NAME, one of: {', '.join(ROOMS)}", file=sys.stderr)
        return 2
    print(*files(room, has_longer=bool(options)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
