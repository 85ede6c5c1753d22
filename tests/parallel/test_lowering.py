"""The training step of eight GPUs, lowered where there is one CPU: what its devices would exchange, and as how many."""

import collections
import dataclasses
import re

import jax
import pytest
from jax.sharding import AbstractMesh

from tests.kernel_helpers import TARGETS, abstract_device, kernel_names
from tests.parallel_helpers import LAYOUTS, WIDE
from tests.train_helpers import make_batch
from zaya_jax.config import ParallelConfig
from zaya_jax.ops.registry import preferred_kernels
from zaya_jax.parallel.mesh import batch_sharding, replicated
from zaya_jax.train.program import Programs

RAGGED = ParallelConfig(expert=4, expert_exchange="ragged")
GATHERED = ParallelConfig(context=4)
RING = LAYOUTS["ring_zigzag4"]
# Masters and gradients, whole matrices for Muon, sums and leaves too small to split.
ZERO1 = {"all_gather", "reduce_scatter", "all_to_all", "all_reduce"}
EXPECTED = {
    "data": (ParallelConfig(), ZERO1),
    "fsdp": (ParallelConfig(fsdp=8), ZERO1),
    "expert": (ParallelConfig(expert=4), ZERO1),
    "expert_ragged": (RAGGED, ZERO1 | {"ragged_all_to_all"}),
    "context": (GATHERED, ZERO1 | {"collective_permute"}),
    "ring": (RING, ZERO1 | {"collective_permute"}),
    "everything": (
        ParallelConfig(fsdp=2, expert=2, context=2, context_attention="ring", expert_exchange="ragged"),
        ZERO1 | {"collective_permute", "ragged_all_to_all"},
    ),
    "fsdp_expert_context": (LAYOUTS["fsdp_expert_context"], ZERO1 | {"collective_permute"}),
}
COLLECTIVE = re.compile(r"stablehlo\.(all_gather|reduce_scatter|all_to_all|all_reduce|collective_permute)\b"
                        r"|custom_call @(ragged_all_to_all)\b")  # fmt: skip


def lowered(parallel: ParallelConfig, platform: str) -> tuple[jax.stages.Traced, jax.stages.Lowered]:
    """A bf16 step on eight devices of `platform`, over a mesh that has none."""
    train = dataclasses.replace(WIDE.train, compute_dtype="bfloat16", remat="full")
    model = dataclasses.replace(WIDE.model, head_dim=64, router_size=16)  # the least that the kernels take
    config = dataclasses.replace(WIDE, model=model, parallel=parallel, train=train)
    program = Programs(config, preferred_kernels(TARGETS[platform]), 8)[0]
    sizes = program.placement.mesh
    mesh = AbstractMesh(sizes.axis_sizes, sizes.axis_names, sizes.axis_types, **abstract_device(TARGETS[platform]))
    program = dataclasses.replace(program, placement=dataclasses.replace(program.placement, mesh=mesh))
    state = program.abstract_state
    split = batch_sharding(mesh, leading=1)
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=split), make_batch(config))
    out = program.placement.shardings(state), replicated(mesh)
    jitted = jax.jit(program.train_step, donate_argnums=0, out_shardings=out)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jitted.trace(state, batch)
        return traced, traced.lower(lowering_platforms=(platform,))


def collectives(text: str) -> collections.Counter:
    """How many of each collective a program has."""
    return collections.Counter(first or second for first, second in COLLECTIVE.findall(text))


# Each takes seconds: the layouts that have the most in them, which between them have each way to exchange.
QUICK = [("everything", "rocm"), ("fsdp_expert_context", "cuda")]
REST = [(name, platform) for platform in TARGETS for name in EXPECTED if (name, platform) not in QUICK]


@pytest.mark.parametrize(("name", "platform"), [*QUICK, *(pytest.param(*row, marks=pytest.mark.soak) for row in REST)])
def test_the_step_lowers_for_eight_gpus(name, platform):
    parallel, expected = EXPECTED[name]
    traced, program = lowered(parallel, platform)
    text = program.as_text()
    assert jax.device_count() == 1
    assert "mhlo.num_partitions = 8 : i32" in text.split("\n", 1)[0]
    moved = collectives(text)
    assert set(moved) == expected
    kernels = set(kernel_names(program))
    assert {"residual_norm_forward", "residual_norm_backward", "cca_mix", "cca_mix_backward"} <= kernels
    assert {"router_forward", "router_backward", "class_sort", "momentum", "gram"} <= kernels
    # A part of a ring has few queries here, and so the kernel for few.
    assert {"attention", "attention_backward_keys"} <= kernels or {"attention_decode", "attention_join"} <= kernels
    # Each stands where shapes are those of a device: outside, the compiler would gather what it is given.
    assert {eqn.primitive.name for eqn in traced.jaxpr.eqns if "pallas_call" in str(eqn)} == {"shard_map"}
    assert "sdy.manual_computation" in text
    assert "bf16" in text
