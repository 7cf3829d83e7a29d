"""The one knowledge of objects, by their types: where walks stop (``barriers.py``), the objects to
which an object refers (``references.py``), and its own bytes (``own_bytes.py``).

Most functions get many objects at once, and ask once for each type, with one object as an example:
the identities of types in sets are all that they keep.
"""
