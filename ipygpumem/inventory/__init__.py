"""The answers to questions about memory, in folders by the question that each answers.

- ``arrays/``: which tensors and arrays are alive, and what is their role?
- ``devices/``: what does the memory of a device consist of?
- ``remaining/``: which objects are new since an experiment or a cell began?
- ``rows/``: which objects does one line free together, and what does it drop besides?
- ``names/``: how much memory does a name hold, and what would deleting it free?
- ``leaks/``: which memory is kept by mistake, or grows with every run?
- ``out_of_memory/``: why did memory run out, and which names would make room?

``heap/`` knows which objects refer to which. Here, these references become rows with sizes and
lines, and ``report/`` writes them. After an experiment that leaves ``cache["x"] = np.ones(10**7)``
behind, ``remaining/`` finds the array, ``rows/`` makes one row of it with the line
``del cache["x"]``, and ``report/leaks.py`` writes the row.
"""
