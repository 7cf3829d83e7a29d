"""Says what memory consists of: the parts of devices, tensors, the largest names, leaks, and what
holds them.
"""
