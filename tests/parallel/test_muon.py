"""Sharded Newton–Schulz: each device does its part of the matrices, and the update is that of one device."""

import math
import re

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from tests.hlo_helpers import collectives, product_flops
from tests.kernel_helpers import TARGETS, abstract_device, kernel_names, kernels
from tests.parallel_helpers import LAYOUTS as MODEL_LAYOUTS
from tests.parallel_helpers import WIDE
from tests.train_helpers import change, fast_jit, make_program, on_devices
from zaya_jax.config import MuonConfig, ParallelConfig
from zaya_jax.ops import LOCAL
from zaya_jax.optim.muon import scale_by_muon
from zaya_jax.parallel.mesh import AXES, make_mesh
from zaya_jax.parallel.muon import on_whole_matrices
from zaya_jax.parallel.rules import place_leaves

SHAPES = {"blocks.0.attention.query": (5, 32, 24), "blocks.0.mixture.experts.gate_up": (3, 8, 16, 48),
          "blocks.0.router.output": (3, 7, 9), "blocks.0.attention.output": (40, 16, 64)}  # fmt: skip
ROLES = {"blocks.0.attention.query": "attention", "blocks.0.mixture.experts.gate_up": "expert",
         "blocks.0.router.output": "router", "blocks.0.attention.output": "attention"}  # fmt: skip
LAYOUTS = [(ParallelConfig(expert=4), "float32"), (ParallelConfig(fsdp=2, context=2), "bfloat16")]
# Stacks of 5, 15 and 40 matrices, which eight devices do not divide but for the last.
STACKS = {"blocks.0.attention.query": (5, 32, 24), "blocks.0.mixture.experts.down": (3, 5, 32, 24),
          "blocks.0.attention.output": (40, 32, 24)}  # fmt: skip
STATES = ("data", "expert4", "fsdp_expert_context")


def gradients():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def updates():
    """The update of each layout, and what the compiler makes of it."""
    results = []
    for parallel, iterates in LAYOUTS:
        compiled, shardings = compiled_update(muon_of(iterates), make_mesh(parallel), SHAPES, ROLES)
        calls = collectives(compiled.as_text() or "", make_mesh(parallel).shape)
        results.append((jax.device_get(compiled(jax.device_put(gradients(), shardings))), calls))
    return results


def muon_of(iterates):
    return scale_by_muon(MuonConfig(newton_schulz_dtype=iterates), {"blocks.0.mixture.experts.gate_up": 2})


def compiled_update(muon, mesh, shapes, roles):
    """The update on a mesh, and where its leaves are."""
    placed = place_leaves(shapes, roles, mesh)
    shardings = {name: jax.sharding.NamedSharding(mesh, place.stored) for name, place in placed.items()}
    on_matrices = on_whole_matrices(placed, mesh)
    grads = {name: jax.ShapeDtypeStruct(shape, np.float32, sharding=shardings[name]) for name, shape in shapes.items()}

    def update(grads):
        return muon.update(grads, muon.init(grads), on_matrices=on_matrices, ops=LOCAL)[0]

    return fast_jit(update, out_shardings=shardings).lower(grads).compile(), shardings


def flops():
    """Of each stack, operations of a device's products where there are eight, and where there is one."""
    muon, flops_by_stack = scale_by_muon(MuonConfig(newton_schulz_dtype="float32")), {}
    for name, shape in STACKS.items():
        role = "expert" if "experts" in name else "attention"
        flops_by_stack[name] = [
            product_flops(compiled_update(muon, mesh, {name: shape}, {name: role})[0].as_text() or "")
            for mesh in (make_mesh(), make_mesh(devices=jax.devices()[:1]))
        ]
    return flops_by_stack


def optimizer_bytes():
    """Bytes of the optimizer's state on each of eight devices that really hold it, in all, and of what is not split."""
    sizes = {}
    for name in STATES:
        config = change(WIDE, {"train.compute_dtype": "float32", "parallel": MODEL_LAYOUTS[name]})
        program = make_program(config, 8)
        state, shardings = program.abstract_state, program.placement.shardings(program.abstract_state)
        leaves = [
            jax.device_put(np.zeros(leaf.shape, leaf.dtype), sharding)
            for leaf, sharding in zip(
                jax.tree.leaves(state.opt_state), jax.tree.leaves(shardings.opt_state), strict=True
            )
        ]
        held = [sum(shard.data.nbytes for x in leaves for shard in x.addressable_shards if shard.device == device)
                for device in jax.devices()]  # fmt: skip
        sizes[name] = held, sum(x.nbytes for x in leaves), sum(x.nbytes for x in leaves if x.is_fully_replicated)
    return sizes


def everything():
    """What one process with eight devices finds."""
    return updates(), flops(), optimizer_bytes()


@pytest.fixture(scope="module")
def results():
    return on_devices(8, "tests.parallel.test_muon:everything")


def test_an_update_over_devices_is_that_of_one(results):
    grads, alone = gradients(), {}
    for iterates in {iterates for _, iterates in LAYOUTS}:
        muon = muon_of(iterates)
        alone[iterates] = fast_jit(lambda grads, muon=muon: muon.update(grads, muon.init(grads), ops=LOCAL)[0])(grads)
    for (parallel, iterates), (update, calls) in zip(LAYOUTS, results[0], strict=True):
        for name, value in update.items():
            expected = np.asarray(alone[iterates][name])
            # A sum in another order may round to the next bf16, which the iteration makes larger.
            tolerance = {"float32": 5e-6, "bfloat16": 0.05}[iterates] * np.abs(expected).max()
            np.testing.assert_allclose(value, expected, rtol=0, atol=tolerance, err_msg=name)
        # Nothing else moves, and nothing within the iteration; experts are whole, and the 7 × 9 matrices are not split.
        assert [(call.kind, call.loops) for call in calls] == [("all-to-all", ())] * 2 * 2, parallel


@pytest.mark.parametrize("name", STACKS)
def test_a_device_does_its_whole_matrices_and_no_more(results, name):
    """Of S matrices ⌈S / 8⌉, the last devices some of zeros."""
    *stack, rows, columns = STACKS[name]
    matrices, (long, short) = math.prod(stack), (max(rows, columns), min(rows, columns))
    # A step has two products with the matrix, one of the Gram.
    matrix_flops = 5 * (2 * 2 * short**2 * long + 2 * short**3)
    assert results[1][name] == [math.ceil(matrices / 8) * matrix_flops, matrices * matrix_flops]


@pytest.mark.parametrize("name", STATES)
def test_a_device_holds_an_eighth_of_the_optimizer(results, name):
    """And the counters and the moments of the temperatures, which are too few to split; nothing is padded."""
    held, total, full = results[2][name]
    assert held == [(total - full) / 8 + full] * 8
    assert full < total / 1000


def test_on_gpus_kernels_see_what_a_device_has():
    """Also of the leaf that is not split: outside a region the compiler would have to gather for them."""
    platform = "rocm"
    target = TARGETS[platform]
    mesh = AbstractMesh((8, 1, 1, 1), AXES, axis_types=(AxisType.Auto,) * len(AXES), **abstract_device(target))
    muon, placed = scale_by_muon(MuonConfig()), place_leaves(SHAPES, ROLES, mesh)
    on_matrices = on_whole_matrices(placed, mesh)
    assert placed["blocks.0.router.output"].axis is None

    def update(grads):
        return muon.update(grads, muon.init(grads), on_matrices=on_matrices, ops=kernels(platform).ops)[0]

    grads = {name: jax.ShapeDtypeStruct(shape, np.float32, sharding=jax.NamedSharding(mesh, placed[name].stored))
             for name, shape in SHAPES.items()}  # fmt: skip
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(update).trace(grads)
        lowered = traced.lower(lowering_platforms=(platform,))
    assert kernel_names(lowered) == ["gram", "gram_polynomial"] * len(SHAPES)
    assert {eqn.primitive.name for eqn in traced.jaxpr.eqns if "pallas_call" in str(eqn)} == {"shard_map"}
    travels = re.findall(r"stablehlo.all_to_all.*-> tensor<\S+x(\w+)>", lowered.as_text())
    assert travels == ["bf16"] * 2 * (len(SHAPES) - 2), "half of what momentum has"
