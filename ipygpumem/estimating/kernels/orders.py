"""The orders of all operators: importing this file registers them."""

from __future__ import annotations

from ipygpumem.estimating.kernels import (  # noqa: F401  # each registers its orders
    attention,
    embeddings,
    indices,
    layers,
    losses,
    products,
    sorting,
    systems,
    transforms,
)
from ipygpumem.estimating.kernels.kernel import ORDERS

__all__ = ["ORDERS"]
