"""Pictures: records in, a matplotlib figure out. matplotlib is optional, so these are imported to draw only."""
