"""The memory that names hold, and what deleting them frees.

After ``model = Net(); best = model.layer``, ``del model`` frees all but the layer.

- ``top.py``: the names that hold the most, with the parts of their objects;
- ``ownership.py``: what deleting a name frees, and the lines for the other memory that its object
  leads to;
- ``other_holders.py``, ``holder_rows.py``: the other holders of that memory, and their rows;
- ``one_line.py``: one line that deletes the name with all other holders;
- ``growth_holders.py``: the names that hold what each run of some code adds.
"""
