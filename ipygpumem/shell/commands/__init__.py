"""Declarations of commands, and the help texts, completions and errors made from them.

- ``declarations.py``: declares the name, the arguments, the help and the completions of a command
  above the function that runs;
- ``parsing.py``: parses a line; a mistake is an error of one line;
- ``completion.py``: completes a line;
- ``helps.py``: the help text that ``?`` shows.
"""
