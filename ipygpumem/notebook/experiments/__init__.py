"""Scopes of notebook code: what opens and ends them, what they own, what is given back at their end."""
