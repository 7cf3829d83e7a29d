"""Gives memory back: names, tracebacks, garbage, caches, in that order."""
