"""JAX's arrays in inventories: by name and without, each buffer once; nothing makes a backend or waits."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX, of the extra 'test'")

SCRIPT = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, ipygpumem
import jax.numpy as jnp, numpy

def listed():
    return [row for row in ipygpumem.tensors().tensors if row.library == "jax"]

assert listed() == []
assert not sys.modules["jax._src.xla_bridge"].backends_are_initialized(), "we made JAX's backend"

weights = {"layer": [jnp.ones((1024, 256))]}
same = jax.device_put(weights["layer"][0], jax.devices()[0])
shown = numpy.asarray(same)
outside = numpy.ones(1 << 18)
rows = {row.name: row for row in ipygpumem.tensors(min_bytes=1 << 18).tensors}
(row,) = [row for row in rows.values() if row.library == "jax"]
assert row.name in ("same", 'weights["layer"][0]'), row
assert (row.size_bytes, row.shape, row.dtype, row.device) == (1 << 20, (1024, 256), "float32", "cpu")
assert row.aliases == 2, row  # the second array of the buffer, and NumPy's view of it
assert rows["outside"].library == "numpy"
assert "shown" not in rows

mesh = jax.sharding.Mesh(numpy.array(jax.devices()), ("x",))
spread = jax.device_put(jnp.ones((4, 1 << 18)), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
spread.block_until_ready()
(row,) = [row for row in listed() if row.name == "spread"]
assert (row.size_bytes, row.note) == (4 << 20, "on 4 devices: the bytes of all"), row

spread.delete()
del weights, same, shown, row, rows
assert not [row for row in listed() if row.size_bytes >= 1 << 20], listed()

@jax.jit
def traced(x):
    ipygpumem.tensors()  # a tracer is no array
    return x * 2
traced(jnp.ones(8))

def make():
    held = jnp.zeros((512, 1024))
    yield held
maker = make(); next(maker)  # an array that no name leads to
(row,) = [row for row in listed() if row.size_bytes == 2 << 20]
"""


def test_each_buffer_is_listed_once_with_its_name_and_jaxs_backend_is_the_users_to_make() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
