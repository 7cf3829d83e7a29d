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

The files:

- ``path_writer.py``: writes a path, and the line that frees its target;
- ``*_steps.py``: the steps through functions, suspended code, attributes, containers, data frames,
  data sets, estimators, mocks, queues, figures, registries, and modules and optimizers of torch;
- ``path_state.py``, ``ways.py``: a path while it is written; finished paths, and one line for
  several of them;
- ``remedies.py``: holders of objects, and remedies: a line with its comment and the references that
  it removes, or words;
- ``cuts.py``, ``statements.py``, ``item_statements.py``, ``item_fields.py``: references that a user
  can remove, and the statement for one; for several; for several items of one container; keys or
  attributes that one loop removes from all items;
- ``loop_variables.py``, ``literals.py``: the variable of a loop; keys as code;
- ``roots.py``, ``ages.py``: where paths begin, with the line of each; which objects are older than
  the memory to free;
- ``attributes_to_remove.py``: attributes and globals that a user may remove;
- ``items_and_attributes.py``: the item or attribute by which one object refers to another;
- ``loggers.py``, ``patches.py``, ``task_endings.py``: the lines that remove handlers, stop patches,
  cancel tasks and timers;
- ``hidden_cycles.py``: the lines that end cycles through arrays of objects.
"""
