"""The storages of estimated code, and the segments of torch's allocator that hold them.

- ``storage_follower.py``, ``storages.py``: follow the storages while code runs, and log when each
  is allocated and freed;
- ``replay.py``, ``caching_allocator.py``: replay the log in a model of torch's caching allocator,
  which tells the peak of the reserved memory.
"""
