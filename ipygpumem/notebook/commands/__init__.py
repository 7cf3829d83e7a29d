"""The magics: their words, their completion, and a file for each command."""
