"""The reason why memory ran out, and the names that would make room.

- ``causes.py``, ``cause_search.py``: decides between a limit, gaps, a process and names; collects
  the figures for that;
- ``unused_names.py``: names of earlier cells that the failed code does not use.
"""
