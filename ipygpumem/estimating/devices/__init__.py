"""The devices of an estimate, on which no tensor really is.

- ``devices.py``, ``named_devices.py``: the device that each tensor is assumed to be on; whether the
  code names it, as in ``x.to("cuda:1")``, or gets it elsewhere;
- ``tensor_locations.py``: whether a fake tensor on the CPU stands for one on a card or on the host;
- ``room.py``: the memory that a device has for the code.
"""
