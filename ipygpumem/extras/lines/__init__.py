"""What code costs, statement by statement and line by line."""
