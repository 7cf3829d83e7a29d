"""The memory guard: a ``MemoryError`` in the cell instead of a killed kernel.

``guard.py`` is the observer of cells, ``memory.py`` measures and limits: ``memory_left.py`` reads
the memory that is left, ``shares.py`` divides it, ``allocation_limit.py`` sets the limit, and
``limit_raising.py`` raises it while code around the user's runs. ``cell_threads.py`` knows the
threads of cells, for which the limit stays after their end. ``watch.py`` interrupts a cell
whose memory is in use before the limit counts it; ``counting.py`` has these two ways to count.
After an error, ``room_for_errors.py`` and ``reserve_block.py`` give IPython memory to show it;
``refusal.py`` and ``causes.py`` find out whether the guard was the cause.

``guard_command.py`` is ``%gpumem guard``, ``report.py`` reports an error, and ``interrupt.py``
raises the error in the cell's thread, with its text. ``replacing.py`` replaces functions of other
modules, and ``openblas_buffers.py`` lets OpenBLAS allocate its buffers first.
"""
