"""The interface to IPython: events, magics, configuration, and the object that holds a shell's
state.

- ``experiments/``: how does an experiment begin and end?
- ``searches/``: what holds memory that is still alive?
- ``commands/``: how is a line of a magic declared, parsed, completed and explained?
- ``ipython/``: which outputs, errors and sources does IPython keep?

The files directly here, in the order in which a notebook needs them:

- ``extension.py``: ``%load_ext ipygpumem`` registers all hooks with IPython. ``app.py`` builds the
  parts of one shell; ``context.py`` has those that all parts share, ``config.py`` the options;
- ``session.py``: a cell from its first event to its report; ``cell.py`` is its state, and says
  which hooks the observers of cells have;
- ``code_observer.py``: the names that the cell's code binds, for open experiments;
- ``advised_lines.py``: whether the cell has a line such as ``del model`` from a report;
- ``dispatch.py``: a magic such as ``%gpumem top`` calls its command. ``python.py`` has the
  functions of ``ipygpumem`` that need a notebook;
- ``notebook_inventory.py``: the memory of names and outputs, for some of these commands;
- ``recovery.py``: frees memory after an error;
- ``display.py``, ``subscribers.py``: show the reports, and pass on the records;
- ``error_isolation.py``: our own failures, which must not reach the cell.
"""
