"""``%%estimate --fit``: finds changes that make code fit, each estimated by a run of its own.

``fit_command.py`` runs the search, and ``fit_options.py`` has its options. ``observing.py``
observes the code's first run, with ``reduction.py`` for its loss; from that, ``changes.py`` makes
the changes that are possible, and ``applying.py`` applies some of them while the code runs again.
"""
