"""Records in, text and HTML out: ``content`` says what is shown, ``text`` and ``html`` how. Nothing measures."""
