"""What cannot fit the memory of the devices is refused before compilation, where arithmetic can tell."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from zaya_jax.config import Config, ParallelConfig
from zaya_jax.config.stages import stages
from zaya_jax.errors import InputError
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.parallel.mesh import SEQUENCE_AXIS, batch_shards
from zaya_jax.train.base import abstract_base
from zaya_jax.train.compiled import abstract_state, step_key
from zaya_jax.train.memory_errors import available_memory, gigabytes
from zaya_jax.train.state import mesh_of


def check_memory(config: Config) -> None:
    """Raise `InputError` where a phase cannot fit the devices of this process, whatever the compiler does.

    Compared with what a device has available is a lower bound of what is in use at the same time: training state with
    all gradients, or with the residual stream that each group of layers keeps for the backward pass; and, during
    evaluation, training state with the residual stream and its norm. Devices on the CPU share the memory of the host;
    other processes on it are not counted.
    """
    available = available_memory()
    stored: dict[ParallelConfig, tuple[int, int]] = {}
    if available is None:
        return
    for phase, one in enumerate(config.phases):
        layout = config.parallel_of(one)
        if layout not in stored:
            state = abstract_state(config, phase)
            everything = _stored_bytes((state, abstract_base(config, phase)))
            stored[layout] = everything, _stored_bytes(state.params)
        _check_phase(config, phase, *stored[layout], available)


def _check_phase(config: Config, phase: int, stored: int, masters: int, available: int) -> None:
    """`stored` and `masters` are the bytes of a device's part of the training state, and of its parameters alone."""
    one, mesh, model = config.phases[phase], mesh_of(config, phase), config.model
    item = accumulation_dtype(config.train.compute_dtype).itemsize
    low = 2 if config.train.compute_dtype == "bfloat16" else item

    def check(needed: int, what: str, remedy: str) -> None:
        if needed > available:
            raise InputError(f"{config.phase_key(phase)} needs at least {gigabytes(needed)} of memory on a device, for "
                             f"{what}, but {gigabytes(available)} are available. {remedy}.")  # fmt: skip

    check(stored + masters * low // item, "parameters, gradients and optimizer state",
          "Use more devices, which share them, or a smaller model")  # fmt: skip
    spread, context = mesh.shape[SEQUENCE_AXIS], config.context_of(one)
    rows = max(-(-step_key(config, stage).sequences // batch_shards(mesh)) for stage in stages(config)
               if stage.phase == phase)  # fmt: skip
    kept = rows * context // spread * model.num_groups * model.hidden_size * item
    check(stored + kept, f"training state and the residual stream of {rows:,} sequences of {context:,} tokens",
          f"Lower {config.batch_key(one)}.micro, the sequences that a device works on at once")  # fmt: skip
    rows, context = -(-config.evaluation.batch // batch_shards(mesh)), config.data.context
    seen = rows * context // spread * model.hidden_size * (item + low)
    check(stored + seen, f"training state and the evaluation of {rows:,} sequences of {context:,} tokens",
          f"Lower evaluation.batch ({config.evaluation.batch:,})")  # fmt: skip


def _stored_bytes(tree: Any) -> int:
    """Bytes of one device's part of abstract arrays; random keys, which are a few bytes, are left out."""
    leaves = [x for x in jax.tree.leaves(tree) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
