"""Measures spans of code: memory before and after, the peak in between, and the sampling thread.

A ``Span`` begins with each cell. ``meter.py`` reads every probe, which begins a new peak then, and
reads it again at the end. While the cell runs, the thread of ``worker.py`` often reads the devices
that record no peak themselves.

- ``traces.py``: the traces of ``with ipygpumem.trace():``, with the meter that measures them;
- ``contexts.py``: the context of torch's accelerator, and its cost;
- ``own_growth.py``: the memory that our own work takes, for the line of the cell.
"""
