"""Finds what keeps an object alive.

For an array in ``runs = [{"x": array}]``, ``search.py`` asks ``backward.py``, which goes from the
array to the dict, to the list, and to the variable ``runs``; ``paths/`` writes this chain as
``runs[0]["x"]``, with the line that ends it.

- ``search.py``: names the holder of each storage or object;
- ``explanation.py``, ``row_removal.py``, ``all_places.py``: the nearest holders of some objects;
  the object to remove for a whole row; all other places that hold its objects;
- ``removal.py``, ``received_records.py``, ``open_figures.py``: what a line removes: an object with
  its arrays; records, and open figures, that leave as a whole;
- ``backward.py``, ``root_finder.py``, ``referrer_graph.py``: go from an object to its referrers,
  level by level, up to the roots, such as names, modules and threads; the references seen;
- ``holder_finder.py``, ``chains.py``: the holders of objects from which users can remove them, such
  as lists; the chains from roots, one through each holder;
- ``kept_by_graphs.py``, ``graph_keepers.py``, ``gradients.py``: the tensors whose autograd graph or
  gradient keeps a storage; all of these in one walk; the gradients that one line may clear;
- ``rows.py``, ``limited_walk.py``: one holder for several arrays, the nearest object that leads to
  all of them; walks to all that an object leads to, within a limit;
- ``registries.py``, ``widgets.py``: roots without names: loggers, signal handlers, timers, figures,
  widgets.
"""
