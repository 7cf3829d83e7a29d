"""Declarations of commands, and the help texts, completions and errors made from them."""
