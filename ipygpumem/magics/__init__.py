"""The magics: parsing, completion, and the code of each command."""
