"""Finds what would save memory: each kind of advice is a function over one look at what is alive."""
