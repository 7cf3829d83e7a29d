"""``ipygpumem.panel``: a live view of memory, cells and the largest names next to the notebook.

- ``panel_command.py``: ``%gpumem panel``;
- ``panel.py``: the thread that sends figures while cells run, and frees when asked;
- ``snapshot.py``: the figures of one moment;
- ``widget.py``, ``panel.js``, ``panel.css``: the widget.
"""
