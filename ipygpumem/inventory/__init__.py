"""Answers questions about memory: which parts a device's memory has, which names and tensors take
it, what an experiment has left, and which line frees it.

An example, from the user's cells to the report's row. The first cell is ``cache = {}``, the second:

    %%experiment
    batch = np.zeros(4_000_000)
    cache["x"] = batch
    cache["log"] = [f"a line of {i}" for i in range(300_000)]

1. Before the experiment, ``baseline.py`` records which arrays exist, and ``contents.py`` which
   objects are in ``cache`` (``long_containers.py``, ``earlier_data.py`` and ``growth.py`` record
   what identities do not tell).
2. At its end, ``watched_names.py`` watches the array of ``batch``. Then the scope deletes the name.
3. The array is still alive. ``array_holders.py`` asks the heap for its holder, and makes a row with
   it (``held_rows.py``): the path ``cache["x"]`` and the line ``del cache["x"]``.
4. ``remaining.py`` finds the rest: the list is new (``new_objects.py``), and ``cache`` has received
   it (``contents.py``). ``remaining_rows.py`` measures it, and makes a row of it.
5. ``merging.py`` makes one row of those that one line frees: ``row_groups.py`` says which,
   ``joint_rows.py`` sums them up, ``joined_lines.py`` joins lines that would fail one after the
   other. Here, both rows have a line of their own.
6. ``ended_cycles.py`` and ``older_data.py`` correct lines that would leave a cycle, or drop more
   than their row (``dropped_objects.py``); here they change nothing.
7. ``shell/survivors.py``, which has called all of these, puts the rows into the record of the
   experiment, and ``report/leaks.py`` shows them::

      size   what                             cell   held by                        to free it
  30.5 MiB   batch: ndarray float64 4000000      3   notebook variable cache["x"]   del cache["x"]

Other questions begin in these files:

- ``%gpumem leaks`` and growth: ``unreached.py``, ``retained.py``; ``trends.py``;
- ``%gpumem top`` and ``why``: ``top.py``; ``ownership.py``, with ``other_holders.py``;
- ``%gpumem tensors``: ``survey.py``;
- ``%gpumem status``: ``findings.py``;
- why memory ran out: ``cause_search.py``.
"""
