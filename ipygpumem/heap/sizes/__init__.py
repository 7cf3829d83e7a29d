"""The memory that objects keep alive.

All that some names lead to is a region. It is read once, as a graph, and then answers for each name
what would be freed with it. For ``a = [big]; b = [big]``, neither name alone keeps ``big`` alive:
it counts for neither of them, and once for both together.

- ``sizes.py``: the questions, answered exactly or with "at least";
- ``region.py``: a region, and what dies with each object;
- ``reading.py``: the loop that reads a region; ``levels.py`` reads many objects at once, and
  ``folding.py`` one with what only it leads to;
- ``frontier.py``: the objects that wait to be read, and the limits;
- ``graph.py``, ``memory.py``: the graph that a reading makes; memory outside of objects, each piece
  counted once;
- ``passing.py``: passes over what some objects lead to, so that none of it counts;
- ``sharing.py``: objects that share memory with a region although no reference leads to them.
"""
