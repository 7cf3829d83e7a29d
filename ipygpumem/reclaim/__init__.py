"""Frees memory: names, tracebacks, garbage, caches, in that order."""
