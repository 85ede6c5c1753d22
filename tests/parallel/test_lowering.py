"""The training step of eight GPUs, lowered where there is one CPU: what its devices would exchange, and as how many."""

import collections
import dataclasses
import re
from typing import Any, NamedTuple

import jax
import pytest
from jax.extend.core import jaxprs_in_params
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


class Lowered(NamedTuple):
    traced: jax.stages.Traced
    program: jax.stages.Lowered
    text: str
    kernels: set[str]


def lowered(parallel: ParallelConfig, platform: str, evaluation: bool = False) -> Lowered:
    """A bf16 step on eight devices of `platform`, over a mesh that has none."""
    train = dataclasses.replace(WIDE.train, compute_dtype="bfloat16", remat="full")
    model = dataclasses.replace(WIDE.model, head_dim=64, router_size=16)  # the least that the kernels take
    config = dataclasses.replace(WIDE, model=model, parallel=parallel, train=train)
    program = Programs(config, preferred_kernels(TARGETS[platform]), 8)[0]
    sizes = program.placement.mesh
    mesh = AbstractMesh(sizes.axis_sizes, sizes.axis_names, sizes.axis_types, **abstract_device(TARGETS[platform]))
    program = dataclasses.replace(program, placement=dataclasses.replace(program.placement, mesh=mesh))
    state = program.abstract_state
    split = batch_sharding(mesh, leading=0 if evaluation else 1)
    batch = {name: jax.ShapeDtypeStruct(x.shape[evaluation:], x.dtype, sharding=split)
             for name, x in make_batch(config).items()}  # fmt: skip
    with jax.sharding.use_abstract_mesh(mesh):
        if evaluation:
            traced = jax.jit(program.evaluation_step).trace(state.params, state.balance, batch)
        else:
            out = program.placement.shardings(state), replicated(mesh)
            traced = jax.jit(program.train_step, donate_argnums=0, out_shardings=out).trace(state, batch)
        in_full = traced.lower(lowering_platforms=(platform,))
    return Lowered(traced, in_full, in_full.as_text(), set(kernel_names(in_full)))


def collectives(text: str) -> collections.Counter:
    """How many of each collective a program has."""
    return collections.Counter(first or second for first, second in COLLECTIVE.findall(text))


def has_kernel(jaxpr: Any) -> bool:
    """Whether a program has a kernel, or one that it calls."""
    return any(
        eqn.primitive.name == "pallas_call" or any(map(has_kernel, jaxprs_in_params(eqn.params))) for eqn in jaxpr.eqns
    )


def check(step: Lowered) -> None:
    """Kernels stand where shapes are those of a device: outside, the compiler would gather what they are given."""
    assert jax.device_count() == 1
    assert "mhlo.num_partitions = 8 : i32" in step.text.split("\n", 1)[0]
    assert not any(eqn.primitive.name == "pallas_call" for eqn in step.traced.jaxpr.eqns)
    calls = [eqn for eqn in step.traced.jaxpr.eqns if any(map(has_kernel, jaxprs_in_params(eqn.params)))]
    assert {eqn.primitive.name for eqn in calls} == {"shard_map"}
    assert "sdy.manual_computation" in step.text
    assert "bf16" in step.text


def test_the_forward_pass_lowers_for_eight_gpus():
    step = lowered(ParallelConfig(fsdp=2, expert=2, context=2, expert_exchange="ragged"), "rocm", evaluation=True)
    check(step)
    assert set(collectives(step.text)) == {"all_gather", "all_reduce", "collective_permute", "ragged_all_to_all"}
    assert {"residual_norm_forward", "cca_mix", "class_sort"} <= step.kernels
    assert {"attention", "attention_decode"} & step.kernels  # for many queries, or for the few of a small part


@pytest.mark.soak
@pytest.mark.parametrize("platform", TARGETS)
@pytest.mark.parametrize("name", EXPECTED)
def test_the_step_lowers_for_eight_gpus(name, platform):
    parallel, expected = EXPECTED[name]
    step = lowered(parallel, platform)
    check(step)
    assert set(collectives(step.text)) == expected
    assert {"residual_norm_forward", "residual_norm_backward", "cca_mix", "cca_mix_backward_rows"} <= step.kernels
    assert {"class_sort", "gram"} <= step.kernels
    # A part of a ring has few queries here, and so the kernel for few.
    assert ({"attention", "attention_backward_keys"} <= step.kernels
            or {"attention_decode", "attention_join"} <= step.kernels)  # fmt: skip
