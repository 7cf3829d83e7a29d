"""Walks from names to the arrays behind them.

For ``runs = [{"x": array}]``, the walk from ``runs`` finds the array, and its path as a user would
type it: ``runs[0]["x"]``.

- ``walk.py``: the walk, many objects at a time, within limits of time and memory;
- ``array_search.py``: the arrays that it finds, each storage once;
- ``named_arrays.py``: their paths;
- ``parts.py``: the largest parts of one object, such as the columns of a data frame.
"""
