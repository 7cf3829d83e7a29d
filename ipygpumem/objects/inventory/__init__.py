"""Lists all tensors and arrays that are alive, by storage: ``survey`` takes an inventory, ``selection`` uses it."""
