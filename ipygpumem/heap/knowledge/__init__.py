"""The one knowledge of objects, by their types.

For ``{"a": array}``, it says that a walk may enter the dict, that it refers to the array and to the
text ``"a"`` (which Python's collector does not report), and that the dict itself takes 184 bytes.

Most functions get many objects at once, and ask once for each type, with one object as an example:
the identities of types in sets are all that they keep.

- ``barriers.py``: what a walk does not enter: modules, running functions, tools;
- ``references.py``, ``text_keys.py``, ``slices.py``, ``torch_references.py``: what an object refers
  to, also what Python does not report;
- ``own_bytes.py``, ``size_methods.py``, ``certainty.py``: an object's own bytes; the types whose
  memory nothing reports;
- ``sorted_types.py``, ``views.py``: how the objects of a type are read; notes on small views of
  large arrays;
- ``frames.py``, ``tasks.py``: running functions; tasks, timers and contexts;
- ``graphs.py``, ``nodes.py``: what autograd graphs keep; walks through their nodes, and how many of
  these may be read.
"""
