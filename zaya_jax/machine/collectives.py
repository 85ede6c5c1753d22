"""Check each collective over all devices against numpy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from zaya_jax.parallel.mesh import make_mesh


def check_collectives() -> dict[str, Any]:
    """Run each collective over all devices of this process, with integers that every dtype represents exactly.

    Returns:
      `devices`: their number. `dtypes`: those that were checked. `skipped`: a sentence, with only one device.
      `failed`: a sentence, if a result differs from numpy's.
    """
    mesh = make_mesh()
    n = mesh.size
    if n < 2:
        return {"devices": n, "skipped": "There is only one device, so there are no collectives to check."}
    rows = np.random.default_rng(0).integers(0, 8, (n, 4 * n))  # sums stay below 256 for up to 36 devices
    chunks = rows.reshape(n, n, 4)
    expected = {
        "psum": np.tile(rows.sum(0), (n, 1)),
        "all_gather": np.tile(rows.reshape(-1), (n, 1)),
        "psum_scatter": rows.sum(0).reshape(n, 4),
        "all_to_all": chunks.swapaxes(0, 1).reshape(n, -1),
        "ppermute": np.roll(rows, 1, 0),
    }
    wrong, dtypes = [], ("float32", "bfloat16", "int32")
    for dtype in dtypes:
        region = jax.shard_map(_collectives, mesh=mesh, in_specs=PartitionSpec("data"),
                               out_specs=PartitionSpec("data"), check_vma=False)  # fmt: skip
        results = jax.device_get(jax.jit(region)(rows.astype(jnp.dtype(dtype))))
        wrong += [f"{name} in {dtype}" for name, array in expected.items() if not np.array_equal(results[name], array)]
    result: dict[str, Any] = {"devices": n, "dtypes": list(dtypes)}
    if wrong:
        result["failed"] = f"Wrong results over {n} devices: {', '.join(wrong)}."
    return result


def _collectives(x_1s: jax.Array) -> dict[str, jax.Array]:
    """Apply each collective to a device's row; each result is a row."""
    n = jax.lax.axis_size("data")
    return {
        "psum": jax.lax.psum(x_1s, "data"),
        "all_gather": jax.lax.all_gather(x_1s, "data", axis=1, tiled=True),
        "psum_scatter": jax.lax.psum_scatter(x_1s, "data", scatter_dimension=1, tiled=True),
        "all_to_all": jax.lax.all_to_all(x_1s.reshape(n, -1), "data", 0, 0, tiled=True).reshape(1, -1),
        "ppermute": jax.lax.ppermute(x_1s, "data", [(i, (i + 1) % n) for i in range(n)]),
    }
