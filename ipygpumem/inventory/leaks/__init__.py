"""Memory that is kept by mistake, or that grows with every run.

For ``losses.append(loss)``, each loss keeps the autograd graph of its step; ``loss.item()`` would
not.

- ``retained.py``: autograd graphs of stored results, outputs, and caches;
- ``stored_graphs.py``, ``graph_nodes.py``: tensors with such graphs, and statements that would not
  store them; the nodes of the graphs;
- ``unreached.py``: objects that no name of the notebook leads to;
- ``trends.py``: cells and loops that keep more memory with every run;
- ``children.py``: the line that ends a child process.
"""
