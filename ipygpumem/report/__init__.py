"""Turns records into text and HTML: ``content`` selects, ``text`` and ``html`` lay out. Nothing
measures.
"""
