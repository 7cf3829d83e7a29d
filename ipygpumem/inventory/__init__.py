"""Breaks down the memory of devices: ``device`` computes the parts, ``findings`` collects the
figures.
"""
