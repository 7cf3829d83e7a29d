"""Turns records into text and HTML. Nothing here measures.

Each file has the reports of one command or record. For ``%gpumem why model``, ``why.py`` makes a
``Report`` of an ``Ownership``: a headline, a table, lines (their classes are in ``layout.py``).
``text.py`` and ``html.py`` then lay out any report, and do not know which one it is.
"""
