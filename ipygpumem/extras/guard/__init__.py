"""The memory guard: a ``MemoryError`` in the cell instead of a killed kernel.

- ``guard_command.py``: ``%gpumem guard``: switches the guard on and off;
- ``guard.py``: observes the cells of a shell and guards each of them;
- ``memory.py``: the memory left, its shares and the limit, as one object;
- ``memory_left.py``: reads how much memory is left;
- ``shares.py``: divides it among the cell, its errors, other code and a reserve;
- ``counting.py``: two ways to count memory: from its allocation, or from its first use;
- ``allocation_limit.py``: limits the allocations of a cell, so that they raise ``MemoryError``;
- ``soft_limit.py``: sets ``RLIMIT_DATA`` for it, and restores the user's own;
- ``limit_raising.py``: raises the limit around output, sockets and the start of threads;
- ``openblas_buffers.py``: allocates the buffers whose refusal would end the process;
- ``cell_threads.py``: knows the threads of cells, for which the limit outlives the cell;
- ``watch.py``: checks memory in use that the limit does not count, in a thread;
- ``interrupt.py``: stops the cell for it: ``MemoryGuardError``, its text and its signal;
- ``room_for_errors.py``: raises the limit for an error, so that IPython can show it;
- ``reserve_block.py``: keeps memory that is freed for the error's first steps;
- ``replacing.py``: replaces functions of IPython and Python, and undoes that;
- ``refusal.py``: recognises the errors by which a refused allocation shows itself;
- ``causes.py``: says whether the guard caused an error, and how;
- ``report.py``: the report of such an error.

Words for the memory beyond a cell's limit:

- *room*: bytes that may still be allocated; for an error, those that are added to the limit so that
  IPython can show it;
- *raise*: the limit is higher for a moment, while code around the user's runs, such as a socket's
  ``send``;
- *cushion*: the bytes by which a raise may exceed the limit;
- *lift*: the limit is absent, while a process is started or a library is loaded;
- *reserve*: memory that no cell may use: it is left for errors and for the code around the cell.
  ``ReserveBlock`` is a small allocated part of it, which is freed for an error's first steps.
"""
