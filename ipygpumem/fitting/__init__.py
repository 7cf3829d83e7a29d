"""Finds the largest value that fits in memory, and pretends that there is less memory than there
is.
"""
