"""Lists all tensors and arrays that are alive, by storage: ``survey`` takes an inventory, which ``records`` defines."""
