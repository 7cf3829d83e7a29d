"""Measures spans of code: before, after, the peak between; the thread that watches meanwhile."""
