"""Finds what keeps an object alive, and the line of code that frees it.

This page follows one example through the files. An experiment has put one array in two places::

    runs, cache = [], {}

    %%experiment
    x = numpy.ones(10_000_000)
    runs.append({"x": x, "loss": 0.5})
    cache["last"] = x

Its end deletes ``x``, but the array is still alive. The report names both places as holders, and
advises ``del runs[0]; del cache["last"]``. These steps lead there:

1. The report calls ``explain`` in ``search.py``, with the heap, the roots and one *row* for each
   line of its table. A row may stand for many arrays (``rows.py``); here it has one. The *roots*
   are the places from which the user can reach objects. They are variables, and the registries of
   libraries, such as open figures and widgets (``registries.py``, ``widgets.py``).
2. ``backward.py`` searches from the array up to the objects that refer to it, level by level. Level
   1 are the dict in ``runs`` and the dict ``cache``; level 2 is the list ``runs``. A level ends at
   the namespace of the notebook, where ``root_finder.py`` recognises the variables ``runs`` and
   ``cache``. ``referrer_graph.py`` keeps all references that were seen::

       root "variable runs"  --> list --> dict --> array
       root "variable cache" --> dict --> array

3. ``explanation.py`` takes the shortest of these *chains*, that from ``cache``: the nearest place.
   ``heap.paths`` writes it as text, ``notebook variable cache["last"]``, with its line, ``del
   cache["last"]``. A chain that is written, with its line, is called a *way*.
4. ``row_removal.py`` decides which object that line should remove. Here it is the array itself. It
   could also be an object around the arrays of the row, such as a group of zarr. For a row of
   several arrays, ``rows.py`` first finds the nearest object that leads to all of them; it walks
   down from the objects on the chain (``limited_walk.py``). ``removal.py`` has the result.
5. The array is still in ``runs``. So ``all_places.py`` extends the search to all other *holders*:
   objects from which a user can remove an item (``holder_finder.py``). ``chains.py`` returns the
   chain through each holder.
6. The dict in ``runs`` is a *record*: the experiment has put it into an older list. Users remove a
   record as a whole, so its line is ``del runs[0]`` (``received_records.py``). A figure that the
   experiment has opened is closed as a whole, too (``open_figures.py``).
7. ``explanation.py`` joins the ways of all places into one: ``notebook variable runs[0], notebook
   variable cache["last"]`` with ``del runs[0]; del cache["last"]``.

If ``x`` were a tensor, an autograd graph could keep its memory without any Python object that
refers to it, as after ``losses.append(model(x).sum())``. ``kept_by_graphs.py`` finds the tensors
with such graphs, all of them in one walk (``graph_keepers.py``). If the memory is that of a
gradient, ``gradients.py`` decides if one ``model.zero_grad()`` may clear it.
"""
