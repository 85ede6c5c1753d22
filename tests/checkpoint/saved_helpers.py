"""Checkpoints of small states, saved as a run does, and what folders of `transformers` hold."""

import json
import os
import platform
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from tests.train_helpers import ROOT
from zaya_jax.checkpoint.environment import cpu_name
from zaya_jax.checkpoint.store import CheckpointStore
from zaya_jax.config import CheckpointConfig
from zaya_jax.hf.safetensors import read_header

WIDTH = 5


def drawn(seed, dtype=jnp.float32):
    """A state with parameters, a bias, a moment and a counter."""
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "params": {"norm.weight": jax.random.normal(keys[0], (WIDTH,)),
                   "blocks.0.query": jax.random.normal(keys[1], (2, WIDTH, 3)).astype(dtype)},
        "balance": {"blocks.0.balancing_bias": jnp.full((2, 4), float(seed))},
        "opt_state": {"mu": jax.random.normal(keys[2], (2, WIDTH, 3))},
        "step": jnp.int32(seed),
    }  # fmt: skip


def about(step, loss=None, **config):
    return {"phase": "one", "tokens_seen": 100 * step, "heldout_loss": loss, "config": {"seed": 0, **config},
            "environment": {"jax": "1"}, "versions": {"python": "3"}}  # fmt: skip


def save_run(run: Path, steps, losses=None, **config) -> Path:
    """A run folder with a checkpoint of each step, whose state is `drawn(step)`."""
    with CheckpointStore(run / "checkpoints", CheckpointConfig(keep=99)) as store:
        for step in steps:
            store.save(step, drawn(step), about(step, (losses or {}).get(step), **config))
    return run


def flip(folder: Path) -> None:
    """One bit of each file of arrays: small arrays lie in two, of which one is read."""
    for path in (folder / "state").rglob("d/*"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)


def set_value(folder: Path, tensor: str, value: float) -> None:
    """Write one value into a tensor of a folder of `transformers`, in the tensor's dtype."""
    stored = read_header(folder / "model.safetensors")[tensor]
    with stored.path.open("r+b") as file:
        file.seek(stored.start + 2 * stored.dtype.itemsize)
        file.write(np.array(value, stored.dtype).tobytes())


def bits(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of a folder of `transformers`: dtype, shape and bytes."""
    return {name: (x.dtype.name, x.shape, x.tobytes())
            for path in sorted(folder.glob("*.safetensors")) for name, x in load_file(path).items()}  # fmt: skip


def write_soak(name: str, what: str, begun: float, counts: Mapping[str, Any]) -> None:
    """Write down in `benchmarks/` what a test that began at `begun` (monotonic seconds) has counted."""
    record = {
        "what": what, "command": "make soak", **counts, "seconds": round(time.monotonic() - begun),
        "versions": {"python": platform.python_version(),
                     **{name: version(name) for name in ("jax", "orbax-checkpoint", "tensorstore", "xxhash")}},
        "hardware": {"machine": platform.machine(), "cpu": cpu_name(), "cpus": len(os.sched_getaffinity(0))},
    }  # fmt: skip
    (ROOT / "benchmarks" / f"soak_{name}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
