"""The parts of a device's memory, which sum exactly to the total.

The memory of ``cuda:0`` consists of tensors, of torch's cache, of the context, and of other
processes.

- ``findings.py``: measures all devices;
- ``breakdown.py``: parts and their sum;
- ``device_parts.py``, ``host_parts.py``: the parts of an accelerator, and of the host;
- ``free_heap.py``: freed memory that stays with malloc.
"""
