"""Tracks the names that a scope owns: bound by its cells, deleted or restored at its end.

For ``x = 1`` before an experiment and ``x = 2; y = 3`` in it, ``bindings.py`` finds both names in
the syntax tree, ``instrumenting.py`` lets the code report when it binds them, and at the end
``scope.py`` gives ``x`` the value 1 and deletes ``y``.

- ``ownable.py``: names that no scope owns, such as IPython's ``_5``;
- ``seeding.py``: random generators with the same numbers in each run of an experiment.
"""
