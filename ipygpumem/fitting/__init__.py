"""The largest value that fits in memory: which values to try, what came of each, and what is given back between."""
