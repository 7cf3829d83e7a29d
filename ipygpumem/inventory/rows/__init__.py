"""Rows of memory: the objects that one line frees.

For ``runs = [[array, array]]``, one row has both arrays, and the line ``del runs[0]``.

- ``held_rows.py``: a row with its holder, while its line may still change;
- ``array_holders.py``, ``searched_rows.py``: the holders of names' arrays; one holder for several
  objects of any kind;
- ``merging.py``, ``row_groups.py``: one row for all that one container holds, and which rows these
  are;
- ``joined_lines.py``, ``joint_rows.py``: one row for rows whose lines depend on each other, and its
  name and size;
- ``shared_memory.py``: one row for an array and a tensor that share memory;
- ``array_parts.py``: the bytes of arrays among the parts of a row's object;
- ``ended_cycles.py``: lines that end the cycles which another line would leave;
- ``dropped_objects.py``: the objects that die when a line is run; ``older_data.py`` and
  ``other_data.py`` look among them for data that is not the memory of the line's row: from before
  an experiment, and of any age.
"""
