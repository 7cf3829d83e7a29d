"""Turns records into text and HTML. Nothing here measures.

Each file has the reports of one command or record. For ``%gpumem why model``, ``why.py`` makes a
``Report`` of an ``Ownership``: a headline, a table, lines (their classes are in ``layout.py``).
``text.py`` and ``html.py`` then lay out any report, and do not know which one it is.

The files that belong to no single report:

- ``words.py``, ``devices.py``: words for objects and for devices;
- ``colours.py``, ``scales.py``: the colours of all pictures, and the lengths of bars;
- ``retained_arrays.py``, ``growth_lines.py``, ``freeing.py``: tables and lines that several reports
  have;
- ``registration.py``, ``printed_records.py``: how a record is shown that ends a cell or is printed;
- ``export.py``: files with all records; ``matplotlib_picture.py``: a figure in a notebook.
"""
