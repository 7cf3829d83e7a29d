"""``ipygpumem.tracker``: tensors and arrays that are added and removed from call to call."""
