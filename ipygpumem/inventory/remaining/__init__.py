"""Objects that are new since a moment, such as the start of an experiment or a cell.

For ``log = []`` before an experiment, and ``log.append(text)`` in it, the list is older, and the
text is new.

- ``baseline.py``, ``earlier_data.py``: the arrays, and the other data, that existed at the start;
- ``contents.py``: what names held at the start, a few references deep; ``long_containers.py`` and
  ``leading.py`` for what is too much to list, ``levels_from_names.py`` for the path to it;
- ``growth.py``, ``grown_rows.py``, ``grown_arrays.py``: older containers that have grown, and their
  rows; arrays that are older than their memory;
- ``new_objects.py``, ``kept_objects.py``: the new objects; those that an experiment keeps on
  purpose;
- ``remaining.py``, ``remaining_rows.py``: all that remains after an experiment, and its rows;
- ``leftover.py``: the RAM that remains although no object accounts for it;
- ``watched_names.py``: which arrays of an experiment's names are still alive.
"""
