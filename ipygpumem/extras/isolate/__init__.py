"""``%%isolate``: runs a cell in a forked child process."""
