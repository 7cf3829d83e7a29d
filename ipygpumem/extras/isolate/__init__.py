"""``%%isolate``: runs a cell in a forked child process.

- ``isolate.py``: shows the output, and binds the names to keep;
- ``child_process.py``: forks, passes Ctrl-C on, and ends the child;
- ``openmp.py``: ends OpenMP's threads before the fork;
- ``kept_names.py``: loads the values that come back;
- ``needs.py``: what the cell needs that a forked process cannot use, such as a GPU's context;
- ``child.py``: runs the cell in the child;
- ``packets.py``: messages and pickled names between the two processes.
"""
