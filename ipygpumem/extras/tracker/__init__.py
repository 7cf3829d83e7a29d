"""``ipygpumem.tracker``: tensors and arrays that came and went from call to call."""
