"""Breaks down the memory of devices: ``breakdown`` computes the parts, ``findings`` collects the
figures.
"""
