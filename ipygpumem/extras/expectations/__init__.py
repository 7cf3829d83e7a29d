"""``ipygpumem.expect``, and the pytest marker ``memory``: memory as a test."""
