"""``%%estimate --fit``: finds changes that make code fit, each estimated by a run of its own.

- ``fit_options.py``: the options ``--fit`` and ``--batch``;
- ``fit_command.py``: the search: estimates the code with each change, then with several and its
  report;
- ``observing.py``: observes the first run: models, batch, optimizers, blocks that may run twice;
- ``reduction.py``: finds out if the loss is a mean or a sum over the rows of the batch;
- ``changes.py``: the changes that are possible: for each its line, and what it does to the code;
- ``applying.py``: applies changes while the code runs: hooks at modules, backward, steps.
"""
