"""Frees memory: names, tracebacks, garbage, caches, in that order.

An example: ``train()`` runs out of memory, and its traceback keeps the tensors of its frames.
``failure.py`` classifies the error (``exceptions.py`` reads it without running its code).
``frames.py`` finds the frames that nothing runs any more, and ``listing.py`` what they hold.
``tracebacks.py`` releases these objects; the traceback still shows its lines. Then ``reclaim.py``
collects garbage and empties the caches (``emptying.py``), and measures the effect of each step.

- ``kept_errors.py``, ``stored_errors.py``, ``error_references.py``: errors that names of the
  notebook keep, as after ``except Exception as e: errors.append(e)``, and the lines that remove
  them;
- ``name_snapshot.py``: whether objects of deleted names may be alive; else there is no garbage;
- ``plain_locals.py``, ``traceback_copies.py``: the small values of an error's frames, which are
  shown before they are cleared; tracebacks that show the same lines without frames.
"""
