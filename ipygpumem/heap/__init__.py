"""The knowledge of live objects, in folders by the question that each answers.

- ``kinds/``: which memory does an array, a tensor, or an object of a library have?
- ``knowledge/``: which objects does an object refer to, where do walks stop, and which bytes are an
  object's own?
- ``live/``: which objects are alive, which refer to them, and which are new?
- ``walks/``: which arrays are behind a name, and by which path?
- ``sizes/``: how much memory do objects keep alive, and which part does only one name keep?
- ``paths/``: how does a path from a name to an object read, and which line removes it?
- ``holders/``: which paths keep an object alive?

Each folder knows only those above it in this list. All folders use the files directly here.
"""
