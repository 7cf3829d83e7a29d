"""The order in which CUDA kernels allocate their results and their intermediate blocks.

The order decides where the allocator places blocks, and so how much memory it reserves. Each rule
was read off the history of torch 2.11's allocator on a simulated card. An operator without a rule
allocates its results, then a workspace of cuBLAS, then all its intermediate blocks at once.

In the sizes, 8 stands for the bytes of an index (int64), and 4 for those of a float32 or an int32.
Most of the other numbers are torch's own: the sizes of its tiles, and the bounds between kernels.

``kernel.py`` logs the allocations of a kernel, and ``orders.py`` registers the rules of all other
files, by kind of operator: ``attention.py``, ``embeddings.py``, ``indices.py``, ``layers.py``,
``losses.py``, ``products.py``, ``sorting.py``, ``systems.py`` and ``transforms.py``.
"""
