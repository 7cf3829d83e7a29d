"""Finds tensors and arrays: what they are, which are alive, what keeps them alive."""
