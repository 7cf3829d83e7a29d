"""Writes the path from a root to an object, and the line of code that frees the object.

This page follows one example through the files. ``heap.holders`` has found out that a variable
leads to an array, as after ``runs = [{"x": numpy.ones(10_000_000)}]``::

    root "variable runs" --> list --> dict --> array

The path is to be ``notebook variable runs[0]["x"]``, and the line ``del runs[0]["x"]``:

1. ``roots.py`` describes the beginning, the *root*: its text, ``notebook variable runs``, and its
   code, ``runs``. The objects after it are the *chain*.
2. ``PathWriter`` (``path_writer.py``) begins a ``Path`` at the root (``path_state.py``). The object
   to which a path leads so far is its *target*: first the list.
3. It appends one *step* for each object on the chain. The type of the object decides which file
   writes the step. Here it is ``container_steps.py`` twice: from the list to its item, ``[0]``, and
   from the dict to its value, ``["x"]``. All ``*_steps.py`` are files of this kind: for functions
   and closures, suspended code (generators, tasks, tracebacks), data frames, data sets, estimators,
   mocks, queues, figures, registries of libraries, and modules and optimizers of torch.
   ``attribute_steps.py`` comes last, for objects of all other types. A function that appends a step
   gets the rest of the chain, and returns the number of references that it has taken: 0 if the
   object is not of its types, and 2 if it wrote two references as one step, as for ``model.head``,
   which is in a dict of the module.
4. Each step says which reference a line could remove, as a ``Cut`` (``cuts.py``). That of the last
   step has the dict as its owner, ``runs[0]``, and the array as its target, ``runs[0]["x"]``. Its
   outer reference is that of the list to the dict. The statement of this cut is the line.
5. Not every reference may be removed. ``attributes_to_remove.py`` tells which attributes the code
   of a class needs; ``ages.py`` tells which objects are older than the memory to free, so that the
   line must keep them. Some objects are ended by a call before they are deleted
   (``task_endings.py``), or only by it (``loggers.py``, ``patches.py``).
6. The finished path is a ``Way`` (``ways.py``): a ``Holder``, which is the text of the path with
   its ``Remedy`` (``remedies.py``), and the references that the line removes. The remedy is a line
   of code with a comment, or words: ``let the function return``.

Often one line has to remove several references. ``statements.py`` writes one statement for all of
them. For many items of one container, it is a slice or a loop, ``del runs[3:7]``
(``item_statements.py``); for the same key of many items, ``for _item in runs: del _item["x"]; del
_item`` (``item_fields.py``, ``loop_variables.py``). If the object has several holders,
``ways.joined`` puts their lines into one: ``del runs[0]["x"]; cache.clear()``.

Many steps use two further files: ``items_and_attributes.py`` finds the item or attribute by which
one object refers to another, and ``literals.py`` writes keys as code. ``hidden_cycles.py`` is about
cycles, not paths: it writes the lines that end cycles through arrays of objects, which the garbage
collector cannot see.
"""
