"""Experiments, from their options to their record.

The cell ``%%experiment a`` opens a scope over the notebook's names, runs, and ends: the names of
the scope are deleted, and the report says what is still alive.

- ``experiments.py``: opens and ends nested experiments;
- ``managed_experiment.py``: one of them; ``experiment_handle.py`` is the object that a user holds;
- ``experiment_options.py``: its options, such as ``--keep``;
- ``measured_scope.py``: its scope, with the state at the start; ``experiment_log.py``: its cells,
  times and errors;
- ``ending.py``: the steps of its end, which an interrupt does not lose;
- ``ended_memory.py``, ``experiment_notes.py``: the memory before and after the end; the notes of
  the report;
- ``ended_names.py``: explains a ``NameError`` of a name that an experiment has ended.
"""
