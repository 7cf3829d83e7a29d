"""The memory guard: a ``MemoryError`` in the cell instead of a killed kernel."""
