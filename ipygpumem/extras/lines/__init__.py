"""The cost of code, statement by statement and line by line.

- ``memlines.py``: ``%%memlines``, which follows the lines of a cell; ``lines.py`` measures each;
- ``gpumemit.py``: ``%gpumemit``, which runs statements several times; ``statements.py`` measures
  them.
"""
