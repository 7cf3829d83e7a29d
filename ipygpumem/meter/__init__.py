"""Measures spans of code: memory before and after, the peak in between, and the sampling thread."""
