"""Tracks the names that a scope owns: bound by its cells, deleted or restored at its end."""
