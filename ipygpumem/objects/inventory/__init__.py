"""Lists all live tensors and arrays, by storage: ``survey`` takes an inventory, which ``records`` defines."""
