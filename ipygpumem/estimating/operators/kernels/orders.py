"""The orders of all operators: importing this file registers them."""

from __future__ import annotations

from ipygpumem.estimating.operators.kernels import (  # noqa: F401  # each registers its orders
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
from ipygpumem.estimating.operators.kernels.kernel import ORDERS

__all__ = ["ORDERS"]
