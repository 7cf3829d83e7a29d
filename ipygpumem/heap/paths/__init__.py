"""Writes the path from a root to an object, and the line that frees the object."""
