"""Tensors and arrays: their description, inventory, and the references that keep them alive."""
