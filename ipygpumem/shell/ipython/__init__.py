"""Facts about IPython.

- ``caches.py``: the outputs that it keeps: ``Out``, ``_5``, ``_``, ``__``, ``___``;
- ``last_errors.py``: the last errors, which ``sys`` and IPython keep for ``%debug``;
- ``printed.py``: the texts that IPython 9 keeps of everything that cells print;
- ``sources.py``: the source of cells, such as which cell has bound a name;
- ``rewriting.py``: the rewriting of cells that begin with a magic such as ``%%experiment``.
"""
