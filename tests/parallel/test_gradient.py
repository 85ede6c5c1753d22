"""The gradient region on quadratic losses, whose gradient is known."""

import functools
from collections.abc import Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from tests.helpers import assert_close
from tests.train_helpers import fast_jit, micro, on_devices
from zaya_jax.config import ParallelConfig
from zaya_jax.parallel.accumulation import scan_layers
from zaya_jax.parallel.gradient import EARLIER, LocalLoss, compute_copy, summed, summed_gradient
from zaya_jax.parallel.layers import gather_layer
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.parallel.rules import LeafPlacement, place_leaves

WIDTH = 3


def local_loss(params, constants, batch):
    """Sum over rows of weight · (x·w + bias − offset)², and how many rows there are."""
    error = batch["x"] @ params["w"] + params["bias"] - constants["offset"]
    loss = jnp.sum(batch["weight"][:, 0] * error**2)
    return loss, {"loss": loss, "rows": jnp.float32(error.shape[0]), "weight": jnp.sum(batch["weight"])}


def problem(rows: int, seed: int) -> tuple[dict, dict, dict]:
    rng = np.random.default_rng(seed)
    params = {"w": rng.normal(size=WIDTH), "bias": rng.normal()}
    batch = {"x": rng.normal(size=(rows, WIDTH)), "weight": rng.random((rows, 1))}
    as_float32 = functools.partial(jax.tree.map, np.float32)
    return as_float32(params), {"offset": np.float32(rng.normal())}, as_float32(batch)


def expected(params: dict, constants: dict, batch: dict) -> tuple[dict, dict]:
    """Sums and gradient by hand, in float64."""
    x, weight = batch["x"].astype(np.float64), batch["weight"][:, 0].astype(np.float64)
    error = x @ params["w"] + params["bias"] - constants["offset"]
    sums = {"loss": (weight * error**2).sum(), "rows": len(x), "weight": weight.sum()}
    return sums, {"w": 2 * (weight * error) @ x, "bias": 2 * (weight * error).sum()}


def region(mesh, loss=local_loss, reduce="step", dtype=jnp.float32, continued=()):
    shapes, roles = {"w": (WIDTH,), "bias": ()}, {"w": "norm", "bias": "bias"}
    leaves, dtypes = place_leaves(shapes, roles, mesh), dict.fromkeys(shapes, dtype)
    return summed_gradient(loss, mesh, leaves, dtypes, reduce, continued=continued)


def sums_alone(mesh):
    shapes, roles = {"w": (WIDTH,), "bias": ()}, {"w": "norm", "bias": "bias"}
    placed = place_leaves(shapes, roles, mesh)
    return summed(lambda *arguments: local_loss(*arguments)[1], mesh, placed, dict.fromkeys(shapes, jnp.float32))


def summed_on(devices: int, micros: int, rows: int, seed: int) -> tuple[dict, dict, dict]:
    """Sums, gradient, and the sums alone, by the region on some devices."""
    params, constants, batch = problem(rows, seed)
    mesh = make_mesh(devices=jax.devices()[:devices])
    reduce = "micro_batch" if seed % 2 else "step"
    gradient = fast_jit(region(mesh, reduce=reduce))
    sums, grads = gradient(params, constants, jax.tree.map(lambda a: micro(a, micros), batch))
    alone = fast_jit(sums_alone(mesh))(params, constants, batch)
    return jax.tree.map(np.array, (sums, grads, alone))


def on_four_devices(cases: list) -> list:
    return [summed_on(*case) for case in cases]


def check(case: tuple[int, int, int, int], result: tuple[dict, dict, dict]) -> None:
    sums, grads = jax.tree.map(np.float32, expected(*problem(*case[2:])))
    chex.assert_trees_all_close(result, (sums, grads, sums), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("micros", "seed"), [(3, 0), (3, 1)])
def test_micro_batches_add_up_to_the_gradient_of_the_whole(micros, seed):
    case = (1, micros, 12, seed)
    check(case, summed_on(*case))


def test_devices_and_micro_batches_add_up_to_the_gradient_of_the_whole():
    cases = [(4, 1, 24, 0), (3, 2, 24, 1), (2, 2, 24, 2)]
    for case, result in zip(cases, on_devices(8, "tests.parallel.test_gradient:on_four_devices", cases), strict=True):
        check(case, result)


def test_a_continued_gradient_includes_those_of_earlier_micro_batches():
    @jax.custom_vjp
    def continued(w, earlier):
        return earlier[1]  # w in its compute dtype

    continued.defvjp(lambda w, earlier: (earlier[1], earlier[0]), lambda total, gradient: (gradient + total, None))

    def loss(params, *others):
        return local_loss({**params, "w": continued(params["w"], params[EARLIER + "w"])}, *others)

    for micros in (1, 3):
        params, constants, batch = problem(12, micros)
        run = fast_jit(region(make_mesh(devices=jax.devices()[:1]), loss, continued=("w",)))
        result = run(params, constants, jax.tree.map(lambda a, micros=micros: micro(a, micros), batch))
        chex.assert_trees_all_close(result, jax.tree.map(np.float32, expected(params, constants, batch)), rtol=1e-4)


def test_gradients_are_added_in_fp32_whatever_the_parameters_are():
    # 600 ones: added in bfloat16 they would stand still at 256.
    def loss(params, _, x):
        return jnp.sum(params["bias"] * x), {"n": jnp.sum(x)}

    params = {"w": jnp.ones(WIDTH, jnp.bfloat16), "bias": jnp.ones((), jnp.bfloat16)}
    _, grad = fast_jit(region(make_mesh(), loss, dtype=jnp.bfloat16))(
        params, None, jnp.ones((600, 4, 1), jnp.bfloat16) / 4
    )
    assert grad["bias"].dtype == jnp.float32
    assert float(grad["bias"]) == 600


def test_the_scan_does_not_hold_the_gradient_of_every_micro_batch():
    mesh = make_mesh()
    placed = place_leaves({"w": (64, 64)}, {"w": "attention"}, mesh)

    def loss(params, _, x):
        return jnp.sum((x @ params["w"]) ** 2), {}

    def memory(micros: int) -> int:
        compiled = fast_jit(summed_gradient(loss, mesh, placed, {"w": jnp.float32}, "step")).lower(
            {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}, None, jax.ShapeDtypeStruct((micros, 2, 64), jnp.float32)
        )
        return compiled.compile().memory_analysis().temp_size_in_bytes

    assert memory(64) < memory(4) + 2 * 64 * 64 * 4


@pytest.mark.parametrize("part", ["gradient", "sums"])
def test_one_device_needs_no_collective(part):
    params, constants, batch = problem(4, 0)
    mesh = make_mesh(devices=jax.devices()[:1])
    if part == "gradient":
        lowered = fast_jit(region(mesh)).lower(params, constants, jax.tree.map(lambda a: micro(a, 2), batch))
    else:
        lowered = fast_jit(sums_alone(mesh)).lower(params, constants, batch)
    assert not any(word in lowered.as_text() for word in ("all_reduce", "all_gather", "reduce_scatter"))


STACKS = {"blocks.0.w": ("attention", (2, 8, 8)), "blocks.0.experts": ("expert", (2, 4, 8, 8))}


def stacked_problem() -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"scale": (8,), **{name: shape for name, (_, shape) in STACKS.items()}}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return params, rng.normal(size=(24, 8)).astype(np.float32)


def stacked_loss(leaves: Mapping[str, LeafPlacement]) -> LocalLoss:
    """A loss of layers, each with a matrix and experts, which gathers what of `leaves` is gathered in layers."""
    gather = gather_layer(leaves, dict.fromkeys(leaves, jnp.float32))

    def layer(h: jax.Array, values: dict[str, Any]) -> tuple[jax.Array, None]:
        full = gather({name: nnx.Param(x) for name, x in values.items()})
        experts = jnp.einsum("bi,eio->bo", h, full["experts"][...])
        return jnp.tanh(h @ full["w"][...] + experts / 8), None

    def loss(params: dict, _: Any, x: jax.Array) -> tuple[jax.Array, dict]:
        stacks = {name.removeprefix("blocks.0."): params[name] for name in STACKS}
        total = (scan_layers(layer, x * params["scale"], stacks)[0] ** 2).sum()
        return total, {"loss": total}

    return loss


LAYOUTS = [({"data": 4}, 3, "step"), ({"fsdp": 4}, 3, "micro_batch"), ({"data": 2, "fsdp": 2}, 1, "step")]


def stacked_on_four_devices() -> list[tuple[dict, dict]]:
    """Sums and gradient of `stacked_loss` on each of `LAYOUTS`; the sums of large layers are added to in place."""
    params, x = stacked_problem()
    roles = {"scale": "norm", **{name: role for name, (role, _) in STACKS.items()}}
    results = []
    for sizes, micros, reduce in LAYOUTS:
        mesh = make_mesh(ParallelConfig(**sizes), jax.devices()[:4])
        leaves = place_leaves({name: value.shape for name, value in params.items()}, roles, mesh)
        dtypes = dict.fromkeys(params, jnp.float32)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("zaya_jax.parallel.gradient.SMALL", 63)
            run = fast_jit(summed_gradient(stacked_loss(leaves), mesh, leaves, dtypes, reduce))
            results.append(jax.device_get(run(params, None, micro(x, micros))))
    return results


def test_layers_that_lie_in_parts_have_the_gradient_of_whole_ones():
    params, x = stacked_problem()
    grads, sums = fast_jit(jax.grad(stacked_loss({}), has_aux=True))(params, None, x)
    results = on_devices(8, "tests.parallel.test_gradient:stacked_on_four_devices")
    for layout, result in zip(LAYOUTS, results, strict=True):
        for ours, theirs in zip(result, (sums, grads), strict=True):
            assert ours.keys() == theirs.keys(), layout
            assert_close(ours, jax.device_get(theirs), 1e-5)


def gathered_experts(by_layer: bool) -> list[tuple[int, ...]]:
    """Shapes of stacks of experts, checked as each layout gathers them: at once as on CPUs, or by layer as on GPUs."""
    shapes = []
    for parallel, experts in (
        (ParallelConfig(data=4), 4),
        (ParallelConfig(data=2, expert=2), 4),
        (ParallelConfig(), 2),
    ):
        mesh, name, shape = make_mesh(parallel, jax.devices()[:4]), "blocks.0.experts", (3, experts, 8, 4)
        leaves = place_leaves({name: shape}, {name: "expert"}, mesh)
        assert leaves[name].gathered_in_layers
        values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        dtypes, kept = {name: jnp.float32}, PartitionSpec(None, leaves[name].own or None)
        gather = jax.shard_map(
            functools.partial(compute_copy, leaves=leaves, dtypes=dtypes), mesh=mesh,
            in_specs=({name: leaves[name].stored},), out_specs={name: kept}, check_vma=False,
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            if by_layer:
                patch.setattr(jax.lax, "platform_dependent", lambda x, *, cpu, default: default(x))
            gathered = fast_jit(gather)({name: values})[name]
        np.testing.assert_array_equal(gathered, values)
        shapes.append(gathered.shape)
    return shapes


def test_experts_are_the_same_gathered_at_once_or_layer_by_layer():
    assert len(on_devices(8, "tests.parallel.test_gradient:gathered_experts", True)) == 3
    assert len(on_devices(8, "tests.parallel.test_gradient:gathered_experts", False)) == 3
