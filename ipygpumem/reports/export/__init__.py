"""A session as a file: one module per format, ``files`` for writing and reading, ``formats`` to choose by suffix."""
