"""How notebooks leak, one scenario per way, in real kernels. ``python -m tests.torture`` prints the whole table."""
