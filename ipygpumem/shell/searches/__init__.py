"""Searches for the holders of memory, with the state of the notebook that they need.

After ``%%experiment a`` has left an array in ``cache``, its end searches for the holder, and
``%gpumem leaks`` searches again later: the array may have died, or moved.

- ``leak_search.py``, ``leaked_objects.py``: ``%gpumem leaks``: arrays; objects of other kinds;
- ``survivor_search.py``, ``survivors.py``: the objects that one experiment has left; those of all
  experiments, remembered for later;
- ``growth_search.py``: the holders of memory that code adds with every run;
- ``baselines.py``, ``older_objects.py``, ``grown_containers.py``: the names and the memory at the
  start of an experiment; older objects behind what it has left; older containers that have grown;
- ``notebook_roots.py``, ``other_places.py``: where paths begin: the notebook's names, and places
  that are no names;
- ``deleted_names.py``: the objects of names that a cell deletes, such as ``del model``.
"""
