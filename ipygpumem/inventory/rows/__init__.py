"""Rows of memory: the objects that one line frees.

For ``runs = [[array, array]]``, one row has both arrays, and the line ``del runs[0]``.

- ``held_rows.py``: a row with its holder, while its line is still written;
- ``array_holders.py``, ``searched_rows.py``: the holders of arrays; which other rows get a search
  for their holders;
- ``merging.py``, ``row_groups.py``: one row for all that one container holds, and which rows these
  are;
- ``joined_lines.py``, ``joint_rows.py``: one row for rows whose lines depend on each other, and its
  name and size;
- ``shared_memory.py``: one row for an array and a tensor that share memory;
- ``array_parts.py``: the bytes of arrays among the parts of a row's object;
- ``ended_cycles.py``: lines that end the cycles which another line would leave;
- ``dropped_data.py``: data that a line drops besides the memory of its row.
"""
