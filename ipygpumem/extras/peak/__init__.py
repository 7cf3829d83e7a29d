"""``%%peak``: runs code and shows what the memory held at its highest moment.

- ``peak_command.py``: ``%%peak``: follows a cell;
- ``peak.py``: ``ipygpumem.peak``: follows a block of code, and makes the record;
- ``following.py``: follows torch's storages, operation by operation;
- ``origins.py``: finds the module, the operation and the line that allocate a storage;
- ``graph.py``: finds the line of the forward pass for an operation of a backward pass;
- ``pages.py``: counts the pages of large storages in RAM: which bytes are used;
- ``cuda.py``: replays the history of CUDA's allocator: the blocks of a card;
- ``host.py``: follows the RAM outside torch with memray;
- ``bound.py``: bounds that RAM by the process's own peak, which the kernel counts;
- ``row_keys.py``: gives storages and blocks the row of the report to which they belong;
- ``timeline.py``: keeps bytes over time, and the blocks of the highest moment;
- ``records.py``: the record;
- ``report.py``: shows the record as tables;
- ``picture.py``: draws the record over time;
- ``words.py``: names the figures of both.
"""
