"""The interface to IPython: events, magics, configuration, and the object that holds a shell's
state.

- ``experiments/``: how does an experiment begin and end?
- ``searches/``: what holds memory that is still alive?
- ``commands/``: how is a line of a magic declared, parsed, completed and explained?
- ``ipython/``: which outputs, errors and sources does IPython keep?
- directly here: cells from their first event to their report (``session.py``, ``cell.py``,
  ``code_observer.py``, ``recovery.py``), and the parts of one shell (``app.py``, ``extension.py``).
"""
