"""Writes the path from a root to an object, and the line that frees the object.

For an array in ``runs = [{"x": array}]``, the path is ``notebook variable runs[0]["x"]``, and the
line is ``del runs[0]["x"]``. Words that all files use:

- root: the place at which a path begins, such as the variable ``runs`` (``roots.py``);
- chain: the objects on the way, here the list, the dict and the array;
- step: the piece of a path through one object, or a few objects of one library, by their type
  (``*_steps.py``). A function that appends a step gets the remaining chain, and returns the number
  of references that the step takes: 0 if the step is none of its own;
- target: the object to which a path leads so far, and its code (``path_state.py``);
- cut: a reference that a line can remove. Its owner is the dict, and its target is the array
  (``cuts.py``). Inside of it, in the list, is its outer reference;
- holder: a path as text with its remedy, the line or words that free the object (``remedies.py``);
- way: a holder with the references that its line removes (``ways.py``).
"""
