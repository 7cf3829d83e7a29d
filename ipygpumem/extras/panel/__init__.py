"""``ipygpumem.panel``: a live view of memory, cells and the largest names next to the notebook."""
