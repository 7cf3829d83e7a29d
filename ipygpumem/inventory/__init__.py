"""The answers to questions about memory, in folders by the question that each answers.

- ``arrays/``: which tensors and arrays are alive, and what is their role?
- ``devices/``: what does the memory of a device consist of?
- ``remaining/``: which objects are new since an experiment or a cell began?
- ``rows/``: which objects does one line free together, and what else does it drop?
- ``names/``: how much memory does a name hold, and what would deleting it free?
- ``leaks/``: which memory is kept by mistake, or grows with every run?
- ``out_of_memory/``: why did memory run out, and which names would make room?

``heap/`` knows which objects refer to which. Here, these references become rows with sizes and
lines, and ``report/`` writes them.

An example, from the user's cell to the report's rows. An earlier cell has run ``cache = {}``::

    %%experiment
    batch = np.zeros(4_000_000)
    cache["x"] = batch
    cache["log"] = ["a line of %d" % i for i in range(300_000)]

1. Before the cell runs, ``remaining/baseline.py`` records which arrays exist, and
   ``remaining/contents.py`` that ``cache`` is empty.
2. When the cell has ended, ``remaining/watched_names.py`` watches the array of ``batch``, and the
   scope deletes that name.
3. The array is still alive. ``rows/array_holders.py`` asks the heap for its holder, and makes a row
   (``rows/held_rows.py``) with the path ``cache["x"]`` and the line ``del cache["x"]``.
4. RAM has grown by more than the array. ``remaining/remaining.py`` looks for the rest: the list is
   new (``new_objects.py``), and ``cache`` has received it (``contents.py``). ``remaining_rows.py``
   measures the list and makes a row of it.
5. ``rows/merging.py`` makes one row of those that one line frees: ``row_groups.py`` says which,
   ``joint_rows.py`` sums them up, and ``joined_lines.py`` joins lines of which the second would
   fail. Here, each row keeps a line of its own.
6. ``rows/ended_cycles.py`` and ``rows/older_data.py`` change lines that would leave a cycle, or
   drop more than their row. Here, they change nothing.
7. ``shell/searches/survivors.py``, which has called all of these, puts the rows into the record of
   the experiment, and ``report/leaks.py`` writes them::

       size   what                             held by                          to free it
   30.5 MiB   batch: ndarray float64 4000000   notebook variable cache["x"]     del cache["x"]
   23.8 MiB   list with str 23.8 MiB           notebook variable cache["log"]   del cache["log"]
"""
