"""Private names of jax: for connecting processes, and for loops that fill no arrays they will write."""

import functools
import os
from typing import Any

import jax
import numpy as np
from jax._src import cache_key, clusters, distributed
from jax._src.lax.control_flow import loops

from zaya_jax.hardware.detection import cpu_name


def detect_job(seconds: int) -> tuple[str | None, int | None, int | None]:
    """Return coordinator, number of processes and index of this process, as the launcher's environment has them."""
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    return clusters.ClusterEnv.auto_detect_unset_distributed_params(address, None, None, None, None, seconds)[:3]


def key_value_store() -> Any:
    """Return the key-value store of jax's coordination service."""
    return distributed.global_state.client


def share_compilation_cache() -> None:
    """Let all processes of a job on CPUs load what process 0 has compiled; on GPUs they do so anyway.

    Only process 0 writes to jax's cache. The keys contain a fingerprint of the topology, which on CPUs differs from
    process to process although nothing else in them does, so the others would compile again at every start. The
    devices of the job are in each key by their ids, too; the name of the processor takes the place of the fingerprint.
    """
    hash_topology = getattr(cache_key, "_hash_accelerator_config", None)
    if hash_topology is None:  # another version of jax: only process 0 then uses the cache
        return

    def hash_devices(hash_obj: Any, devices: np.ndarray) -> None:
        if devices.flat[0].platform == "cpu":
            hash_obj.update(cpu_name().encode())
        else:
            hash_topology(hash_obj, devices)

    cache_key._hash_accelerator_config = hash_devices


@functools.cache
def leave_stacks_unfilled() -> None:
    """Let `jax.lax.scan` leave the stacks of its outputs uninitialised on GPUs, as each of its steps writes its part.

    jax fills them with zeros first. In a training step they hold the activations that the layers' backward passes need,
    so that each micro-batch would write these twice. Elsewhere `jax.lax.empty` gives zeros, and nothing changes.
    """
    filled: Any = getattr(loops, "_empty_array", None)

    def unfilled(prefix: tuple[int, ...], axes: tuple[Any, ...], step: Any) -> jax.Array:
        """Make the stack of an output `step`; `axes` are the mesh axes that `prefix` is split over."""
        split = any(axes) or any(step.sharding.spec) or step.mat.varying
        if split or step.memory_space != jax.memory.Space.Device:
            return filled(prefix, axes, step)
        return jax.lax.empty((*prefix, *step.shape), step.dtype)

    if filled is not None:  # other versions of jax may have none: they fill stacks
        loops._empty_array = unfilled
