"""``%%isolate``: runs a cell in a forked child process.

- ``isolate.py``: forks, shows the output, and takes back the names to keep;
- ``needs.py``: what the cell needs that a forked process cannot use, such as a GPU's context;
- ``child.py``: runs the cell in the child;
- ``packets.py``: messages and pickled names between the two processes.
"""
