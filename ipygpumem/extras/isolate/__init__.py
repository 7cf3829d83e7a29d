"""``%%isolate``: runs a cell in a forked child process.

- ``isolate.py``: forks, shows the output, and takes back the names to keep;
- ``needs.py``, ``openmp.py``: what the cell needs that a forked process cannot use, such as a GPU's
  context; the threads of OpenMP, which the child lacks;
- ``child.py``, ``child_process.py``: runs the cell in the child; the child as the kernel sees it;
- ``kept_names.py``, ``packets.py``: the names that come back; messages between the two processes.
"""
