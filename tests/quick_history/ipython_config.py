"""IPython's configuration in the kernels of tests."""

# Writing the history to the disk after each cell takes longer than a short cell.
get_config().HistoryManager.db_cache_size = 1000  # type: ignore[name-defined]  # noqa: F821
