"""Optional cell observers: trends, subscribers."""
