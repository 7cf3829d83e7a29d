"""All live tensors and arrays, by storage.

After ``x = torch.ones(1000); y = x[:10]``, there is one storage of 4,000 bytes, with two tensors
and two names.

- ``survey.py``: lists all of them, with names, devices and bytes;
- ``records.py``: such lists, their differences and selections, as plain data;
- ``tensor_records.py``, ``jax_records.py``: the tensors of torch with the arrays of NumPy; the
  arrays of JAX;
- ``labels.py``: the names of tensors, and the cells that bound them;
- ``roles.py``: parameters, gradients, buffers, and the state of optimizers.
"""
