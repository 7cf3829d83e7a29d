"""Finds the largest value that fits in memory, and simulates smaller devices.

For ``%%autofit batch=64``, the cell runs with the value that ``plan.py`` chooses, first 64, and
``fit.py`` measures it. If memory runs out, that frees the try's memory, and ``plan.py`` chooses the
next value.

- ``functions.py``: the same for a function: ``ipygpumem.autofit(train, batch=64)``;
- ``budgets.py``, ``reservations.py``: a smaller device or host, by a limit, or by memory that is
  reserved.
"""
