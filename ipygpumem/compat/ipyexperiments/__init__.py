"""The interface of ipyexperiments 0.1.29 over our experiments: change the import, and the notebook runs.

Its modules are found under their names: ``cell_logger``, ``ipyexperiments``, ``utils.mem`` and ``utils.ipython``.
docs/moving.md says what is different.
"""

from ipygpumem.compat.ipyexperiments.ipyexperiments import (
    IPyExperiments,
    IPyExperimentsCPU,
    IPyExperimentsGPU,
    IPyExperimentsPytorch,
)

__all__ = ["IPyExperiments", "IPyExperimentsCPU", "IPyExperimentsGPU", "IPyExperimentsPytorch"]
"""With an asterisk no module comes: a notebook's own ``utils`` stays."""

__version__ = "0.1.29"
"""The one of ipyexperiments whose interface this is."""
