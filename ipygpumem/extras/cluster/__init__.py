"""``--on``: experiments and commands on the engines of an ipyparallel cluster.

- ``on_option.py``: the option;
- ``on_engines.py``: sends a cell or a command to the engines;
- ``engine.py``: runs it there;
- ``engines_report.py``: one report of all engines.
"""
