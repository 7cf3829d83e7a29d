"""All live objects.

After ``x = np.ones(10**6)``, the list of live objects in ``heap.py`` has the array, and
``referrers.py`` finds that the notebook's dict of variables refers to it.

- ``heap.py``: all live objects, listed in one pass for each look;
- ``referrers.py``: the objects that refer to given ones;
- ``garbage.py``, ``objects_since.py``: garbage collection; objects made since a moment;
- ``total.py``: the bytes of all objects together;
- ``live_tensors.py``: all tensors, also those that only autograd graphs keep;
- ``remembered.py``: recognises objects again without keeping them alive.
"""
