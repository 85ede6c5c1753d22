"""Bytes of one device, from the sharding table and the rematerialisation policy; nothing is allocated.

What stays between steps is exact. What a backward pass keeps is counted at the shapes one device has, from the
traced program: the residuals of its `vjp`. A compiler may do a little better or worse. Memory is highest either
in the backward pass or where Muon orthogonalises the largest stack of matrices, when the pass is over.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from zaya_jax.config import Config, PhaseConfig
from zaya_jax.config.phases import Remat
from zaya_jax.model.layers import MATRIX_ROLES
from zaya_jax.model.lora import ADAPTED
from zaya_jax.model.loss import CHUNK
from zaya_jax.model.tree import shapes
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.ops.registry import choose
from zaya_jax.ops.target import Target
from zaya_jax.parallel.gradient import compute_copy, frozen_copy
from zaya_jax.parallel.layout import Layout
from zaya_jax.parallel.mesh import batch_spec
from zaya_jax.train.base import frozen_shapes
from zaya_jax.train.state import PhaseSpec, init_state, layout_of, make_blueprint
from zaya_jax.train.step import make_local_loss

TARGET = Target("rocm", "gfx942")  # whose operations are traced; none is compiled


class Memory(NamedTuple):
    """Bytes of one device at the height of a step.

    Attributes:
      parameters: masters.
      optimizer: moments, balancing, counters.
      compute: the copy that is computed with.
      gradients: those added up over micro-batches, and one micro-batch's.
      activations: what the backward pass of a micro-batch keeps.
      temporaries: of a layer's backward pass, gathered layers, a chunk of logits.
      update: beside masters, optimizer and the sum of gradients, where the optimizer's step is highest.
      frozen: parameters under adapters.
    """

    parameters: int
    optimizer: int
    compute: int
    gradients: int
    activations: int
    temporaries: int
    update: int
    frozen: int = 0

    @property
    def total(self) -> int:
        """All that is there at the same time, at the higher of the two heights."""
        passes = self.compute + self.gradients + self.activations + self.temporaries
        return self.frozen + self.parameters + self.optimizer + max(passes, self.update)


def memory_of(config: Config, phase: int, mesh: AbstractMesh, sequences: int) -> Memory:
    """The memory of a device in a phase.

    Args:
      config: of the run.
      phase: which of its phases.
      mesh: of as many devices as there would be.
      sequences: of a micro-batch, on one device.
    """
    blueprint = make_blueprint(config, phase)
    layout = layout_of(config, blueprint, mesh)
    state = jax.eval_shape(lambda: init_state(config, blueprint))
    frozen = frozen_shapes(config, blueprint)
    masters, rest = stored_bytes(layout, state)
    copy, every = _copies(layout, state.params, frozen)
    kept = {name: every[name] for name in blueprint.trained}
    micro = layout.config.reduce == "micro_batch"
    one = sum(math.prod(shape) * dtype.itemsize for shape, dtype in kept.values())
    added = (
        masters
        if micro
        else sum(math.prod(shape) * accumulation_dtype(dtype).itemsize for shape, dtype in kept.values())
    )
    shape = (sequences, config.context_of(config.phases[phase]))
    activations = residual_bytes(config, blueprint, layout, shape)
    temporaries, update = _temporaries(config, phase, layout, shape), _update(config, blueprint, layout, masters)
    still = _bytes(frozen, layout.shardings(frozen))
    return Memory(masters, rest, copy, added + one, activations, temporaries, update, still)


def stored_bytes(layout: Layout, state: Any) -> tuple[int, int]:
    """Bytes of the masters, and of the rest of a (possibly abstract) training state, on one device."""
    shardings = layout.shardings(state)
    masters = _bytes(state.params, shardings.params)
    return masters, _bytes(state, shardings) - masters


def _bytes(tree: Any, places: Any) -> int:
    sizes = jax.tree.map(lambda x, s: math.prod(s.shard_shape(x.shape)) * _itemsize(x), tree, places)
    return sum(jax.tree.leaves(sizes))


def _update(config: Config, blueprint: PhaseSpec, layout: Layout, masters: int) -> int:
    """The gradients as masters lie, and Newton–Schulz of the largest stack: two iterates, a product, a polynomial."""
    sums = accumulation_dtype(config.train.compute_dtype).itemsize
    if config.matrices != "muon":
        return masters
    item = 2 if config.optimizer.muon.iterates == "bfloat16" else sums
    highest = 0.0
    for name, shape in shapes(blueprint.model).items():
        if blueprint.roles[name] in MATRIX_ROLES:
            place, (p, q) = layout.placed[name], sorted(shape[-2:])
            parts = math.prod(layout.mesh.shape[axis] for axis in place.over) if place.axis is not None else 1
            experts = layout.mesh.shape["expert"] if place.by_expert else 1
            stack = -(-math.prod(shape[:-2]) // (parts * experts))  # matrices a device has whole, padding included
            highest = max(highest, stack * (p * q * (2 * item + sums) + p * p * item))
    return masters + int(highest)


def _itemsize(x: Any) -> int:
    return 8 if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x.dtype.itemsize


def _copies(layout: Layout, params: dict[str, Any], frozen: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Bytes of the compute copy that are not what is stored itself, and shape and dtype of each of its leaves."""

    def look(copy: Any, still: Any) -> dict[str, Any]:
        return {name: (x.shape, x.dtype) for name, x in {**still, **copy}.items()}

    found, own, stored = _local(layout, look, params, frozen), 0, {**frozen, **params}
    for name, (shape, dtype) in found.items():
        place = layout.placed[name]
        same = not place.gathered and dtype == stored[name].dtype
        own += 0 if same else math.prod(shape) * dtype.itemsize
    return own, found


def copies(config: Config, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter's compute copy on one device."""
    blueprint = make_blueprint(config)
    params = jax.eval_shape(lambda: init_state(config, blueprint)).params
    return {name: shape for name, (shape, _) in _copies(layout, params, frozen_shapes(config, blueprint))[1].items()}


def _local(layout: Layout, look: Any, params: Any, frozen: Any, *more: Any, specs: tuple[Any, ...] = ()) -> Any:
    """What `look` finds of the compute copies, trained and frozen, and `more` at the shapes of one device."""
    found = []

    def region(params: Any, frozen: Any, *more: Any) -> None:
        found.append(
            look(compute_copy(params, layout.placed, layout.dtypes), frozen_copy(frozen, layout.placed), *more)
        )

    stored = ({name: layout.placed[name].stored for name in some} for some in (params, frozen))
    jax.eval_shape(
        jax.shard_map(region, mesh=layout.mesh, in_specs=(*stored, *specs), out_specs=PartitionSpec(), check_vma=False),
        params, frozen, *more,
    )  # fmt: skip
    return found[0]


def residual_bytes(config: Config, blueprint: PhaseSpec, layout: Layout, shape: tuple[int, int]) -> int:
    """Bytes that one device keeps between the passes over a micro-batch of `shape` (its sequences, all tokens)."""
    target = choose(TARGET, config.model, config.train.compute_dtype).target
    loss = make_local_loss(config, blueprint, dataclasses.replace(layout, target=target).ops())
    batches = math.prod(layout.mesh.shape[axis] for axis in ("data", "fsdp", "expert"))
    whole = (shape[0] * batches, shape[1])
    kinds = {"tokens": "int32", "targets": "int32", "segment_ids": "int32", "positions": "int32", "loss_mask": "bool"}
    batch = {name: jax.ShapeDtypeStruct(whole, dtype) for name, dtype in kinds.items()}
    state = jax.eval_shape(lambda: init_state(config, blueprint))

    def look(copy: Any, still: Any, balance: Any, batch: Any) -> int:
        _, pull, _ = jax.vjp(lambda copy: loss({**still, **copy}, balance, batch), copy, has_aux=True)
        given = {id(x) for x in jax.tree.leaves((copy, still, balance, batch))}
        kept = [x for x in jax.tree.leaves(pull) if hasattr(x, "dtype") and id(x) not in given]
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in kept)

    frozen = frozen_shapes(config, blueprint)
    return _local(layout, look, state.params, frozen, state.balance, batch, specs=(PartitionSpec(), batch_spec()))


def _temporaries(config: Config, phase: int, layout: Layout, shape: tuple[int, int]) -> int:
    """A group of layers computed again, its gathered parameters, and a chunk of the loss' logits."""
    model = config.model

    def kept(remat: Remat) -> int:
        one: PhaseConfig = dataclasses.replace(config.phases[phase], remat=remat)
        small = dataclasses.replace(model, num_layers=len(model.period), layer_pattern=model.period)
        changed = dataclasses.replace(config, model=small, phases=(one,))
        blueprint = make_blueprint(changed)
        return residual_bytes(changed, blueprint, layout_of(changed, blueprint, layout.mesh), shape)

    again = max(0, kept("none") - kept("full"))
    sums = accumulation_dtype(config.train.compute_dtype).itemsize
    chunk = min(CHUNK, shape[0] * shape[1] // layout.mesh.shape["context"])
    logits = 2 * chunk * model.vocab_size * sums
    return max(again + _merging(config, make_blueprint(config, phase), layout), logits)


def _merging(config: Config, blueprint: PhaseSpec, layout: Layout) -> int:
    """Of the largest matrix that has adapters, in one layer: their product, or its gradient, and the sum, in fp32."""
    if config.lora is None:
        return 0
    experts = layout.mesh.shape["expert"]
    sizes = [math.prod(shape[1:]) // (experts if layout.placed[name].by_expert else 1)
             for name, shape in shapes(blueprint.model).items() if blueprint.roles[name] in ADAPTED]  # fmt: skip
    return 2 * max(sizes) * accumulation_dtype(config.train.compute_dtype).itemsize
