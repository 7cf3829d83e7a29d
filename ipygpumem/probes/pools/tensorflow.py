"""TensorFlow: what it uses of a GPU (``tf.config.experimental.get_memory_info``). What it reserves it does not say."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from ipygpumem.probes.pools import Pool


def pools(tensorflow: Any) -> Iterator[Pool]:
    """Yield the pool of each GPU, if TensorFlow has begun: to ask it earlier would reserve whole devices."""
    made = getattr(sys.modules.get("tensorflow.python.eager.context"), "_context", None)
    if not getattr(made, "_initialized", False):
        return
    for index in range(len(tensorflow.config.list_logical_devices("GPU"))):
        info = tensorflow.config.experimental.get_memory_info(f"GPU:{index}")
        yield Pool(index, info["current"], info["peak"])
