"""Turns records into text and HTML: ``text`` and ``html`` lay out the reports that all other files
make of records. Nothing measures.
"""
