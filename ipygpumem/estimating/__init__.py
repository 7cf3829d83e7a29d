"""Estimates of the memory that code would take on a device: runs it on fake tensors, and logs their
storages.

For ``%%estimate --device cuda`` above ``loss = model(x).sum(); loss.backward()``, ``running.py``
runs both statements on fake copies of ``model`` and ``x``; ``allocation_tracker.py`` intercepts
each operation and logs what it allocates on a card; replayed in a model of torch's allocator, the
log tells the peak.

- ``isolation/``: which copies does the code get, and what is undone after it?
- ``operators/``: how much memory does each operation allocate on a card?
- ``devices/``: on which device would each tensor be?
- ``memory/``: when is each storage allocated and freed, and how much is reserved for them?
- ``loading.py``: imports all this, and torch, when it is needed;
- ``summaries.py``: the parameters and activations of a model's modules;
- ``limits.py``, ``unfollowed.py``, ``effects.py``: code that takes too long, that is not followed
  exactly, or that cannot be undone;
- ``user_lines.py``, ``records.py``: the user's line that runs; the results.
"""
