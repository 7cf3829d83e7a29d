"""The order in which CUDA kernels allocate their results and their intermediate blocks.

The order decides where the allocator places blocks, and so how much memory it reserves. Each rule
was read off the history of torch 2.11's allocator on a simulated card. An operator without a rule
allocates its results, then a workspace of cuBLAS, then all its intermediate blocks at once.

``kernel.py`` logs the allocations of a kernel, and ``orders.py`` registers the rules of all other
files, by kind of operator: ``attention.py``, ``embeddings.py``, ``indices.py``, ``layers.py``,
``losses.py``, ``products.py``, ``sorting.py``, ``systems.py`` and ``transforms.py``.
"""
