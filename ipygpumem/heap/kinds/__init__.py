"""The memory of each kind of object.

For ``frame = pd.DataFrame({"x": range(10**6)})``, ``libraries.py`` finds the array behind the
column, and ``arrays.py`` its storage: 8 MB at one address.

- ``arrays.py``, ``tensors.py``: arrays and tensors, with their storages; also the arrays inside
  pandas' objects;
- ``libraries.py``: memory inside the objects of libraries, through their calls, Arrow's interface
  (``arrow.py``) or their C structs (``structs.py``);
- ``mapped.py``: memory that is a mapped file, of which only the pages in RAM count;
- ``large.py``: texts and bytes that are large by themselves;
- ``watching.py``: arrays and tensors that are watched until they die.
"""
