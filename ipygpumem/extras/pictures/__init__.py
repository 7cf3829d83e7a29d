"""Pictures of records: ``%gpumem plot`` and ``ipygpumem.plot``."""
