"""``%%peak``: runs code and shows what the memory held at its highest moment.

``peak.py`` follows a block of code, ``peak_command.py`` a cell. torch's storages are followed by
``following.py``, which asks ``origins.py`` and ``graph.py`` for the line and the operation of each;
the history of CUDA's allocator is replayed by ``cuda.py``; the remaining RAM is followed with
memray by ``host.py``, and bounded by the pages in RAM (``pages.py``, ``bound.py``). ``row_keys.py``
sums storages and blocks as rows; ``timeline.py`` keeps those of the highest moment. ``records.py``
has the record, which ``report.py`` and ``picture.py`` show in the words of ``words.py``.
"""
