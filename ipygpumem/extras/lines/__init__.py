"""The cost of code, statement by statement and line by line."""
