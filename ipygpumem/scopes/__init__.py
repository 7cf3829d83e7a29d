"""Knows which names a scope owns: what its cells bind, what is deleted and restored at its end."""
