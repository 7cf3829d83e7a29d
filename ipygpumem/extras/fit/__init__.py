"""``%%estimate --fit``: finds changes that make code fit, each estimated by a run of its own."""
