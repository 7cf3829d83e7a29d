"""Opens and ends the scopes of notebook code, and gives back what they own."""
