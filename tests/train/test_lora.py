"""Steps that train adapters: what they compute, on one device and on several, and what they never make."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from tests.parallel_helpers import WIDE, uneven
from tests.train.test_step import drawn, mean_loss
from tests.train_helpers import (
    ADAPTERS,
    change,
    differing,
    fast_jit,
    leaves,
    make_program,
    on_devices,
    placed_step,
    setup,
)
from tests.train_helpers import make_batch as any_batch
from zaya_jax.config import LoraConfig, ParallelConfig
from zaya_jax.lab.predict.dry_run.estimate import simulated_programs
from zaya_jax.model.lora import Adapted, adapted, merged
from zaya_jax.train.state import init_state
from zaya_jax.train.step import make_local_loss

LORA = LoraConfig(rank=3, alpha=6.0)
FOUR = {
    "data": ParallelConfig(),
    "micro_batch": ParallelConfig(gradient_reduction="micro_batch"),
    "fsdp": ParallelConfig(fsdp=4),
    "hybrid": ParallelConfig(data=2, fsdp=2),
    "expert": ParallelConfig(expert=4),
    "fsdp_expert": ParallelConfig(fsdp=2, expert=2),
    "ring": ParallelConfig(fsdp=2, context=2, context_attention="ring"),
}


def filled(adapters, seed=0):
    """Adapters of which neither is zero."""
    rng = np.random.default_rng(seed)
    return {name: x + np.asarray(0.1 * rng.normal(size=x.shape), x.dtype) for name, x in adapters.items()}


make_batch = functools.partial(any_batch, ADAPTERS)


@functools.cache
def model():
    """Parameters and balancing biases of the model under the adapters, and the roles of the former."""
    return *drawn(ADAPTERS), make_program(change(ADAPTERS, {"lora": None})).roles


def step(state):
    return setup(ADAPTERS).compiled(state, make_batch(), model()[0])


# --- what a step computes --------------------------------------------------------------------------------------


def test_the_state_holds_adapters_alone_and_all_of_them_move():
    state = setup(ADAPTERS).state
    new, _ = step(state)
    matrices = {name for name, role in model()[2].items() if role in ("attention", "expert")}
    assert state.params.keys() == {f"{name}.lora_{part}" for name in matrices for part in "ab"}
    held = sum(x.size for x in jax.tree.leaves((state.params, state.opt_state)) if x.ndim)
    assert held == 3 * sum(x.size for x in state.params.values())  # with both moments
    assert {x.dtype for x in state.params.values()} == {np.dtype("float32")}
    moved = differing(new.params, state.params)
    # While B is 0, A has no gradient.
    assert moved == [f"['{name}']" for name in state.params if name.endswith("lora_b")]
    again, _ = step(new)
    assert differing(again.params, new.params) == [f"['{name}']" for name in state.params]


def test_the_gradient_is_that_through_the_merged_matrices():
    with jax.enable_x64(True):
        config = change(ADAPTERS, {"train.compute_dtype": "float64"})
        program = make_program(config)
        whole, balance = ({name: np.float64(x) for name, x in some.items()} for some in model()[:2])
        adapters = filled({name: np.zeros(shape) for name, shape in program.trained.items()})
        gradient = fast_jit(program.placement.gradient(make_local_loss(program)))
        sums, grads = gradient(adapters, balance, make_batch(), whole)

        @fast_jit
        def plain(adapters):
            values = adapted({**whole, **adapters}, ADAPTERS.lora.scale)
            values = {name: x.base + 2.0 * (x.a @ x.b) if isinstance(x, Adapted) else x for name, x in values.items()}
            return mean_loss(values, balance, make_batch(), config) * make_batch()["loss_mask"].sum()

        assert float(sums["loss"]) == pytest.approx(float(plain(adapters)), rel=1e-12)
        assert grads.keys() == adapters.keys()
        rng, size = np.random.default_rng(1), 1e-4
        for name, x in adapters.items():  # the slope in some direction, by differences of the fourth order
            way = rng.normal(size=x.shape)
            near, far = (float(plain({**adapters, name: x + by * way})) - float(plain({**adapters, name: x - by * way}))
                         for by in (size, 2 * size))  # fmt: skip
            slope = (8 * near - far) / (12 * size)
            assert abs(slope) > 1e-6, name
            assert (grads[name] * way).sum() == pytest.approx(slope, rel=1e-8), name


def test_the_loss_falls_on_a_repeated_batch():
    state, losses = setup(ADAPTERS).state, []
    for _ in range(30):
        state, metrics = step(state)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.1
    assert metrics["learning_rate"] == pytest.approx(ADAPTERS.optimizer.adamw.learning_rate, rel=0.2)


# --- what is never there ---------------------------------------------------------------------------------------


def test_no_stack_of_matrices_is_there_in_fp32():
    """Neither masters, nor merged matrices, nor gradients: of all layers together there is the base alone, in bf16."""
    config = change(ADAPTERS, {"train.compute_dtype": "bfloat16", "train.remat": "full", "model.num_layers": 5})
    program = make_program(config)
    text = str(jax.make_jaxpr(program.train_step)(program.abstract_state, make_batch(), program.abstract_base))
    stacks = {x.shape for name, x in model()[0].items() if model()[2][name] in ("attention", "expert")}
    kinds = {(tuple(map(int, shape.split(","))), kind)
             for kind, shape in re.findall(r"\b(bf16|f32)\[(\d+(?:,\d+)+)\]", text)}  # fmt: skip
    assert {kind for shape, kind in kinds if shape in {(5, *stack[1:]) for stack in stacks}} == {"bf16"}
    assert {(stack[1:], "f32") for stack in stacks} <= kinds  # of one layer the sum is made in fp32


# --- several devices -------------------------------------------------------------------------------------------


def run_layout(parallel, devices=4, steps=2):
    """In double precision the gradient at the start, and of some steps the losses and the adapters after them."""
    with jax.enable_x64(True):
        config = change(WIDE, {"parallel": parallel, "lora": LORA, "init_from": "a run"})
        config.check()
        program, full = make_program(config, devices), make_program(change(WIDE, {"parallel": parallel}), devices)
        placement = program.placement
        whole = fast_jit(lambda: init_state(full).params)()
        start = fast_jit(lambda: uneven(init_state(program)))()
        start = dataclasses.replace(start, params=filled(start.params))
        state, whole = (jax.device_put(tree, placement.shardings(tree)) for tree in (start, whole))
        step, batch = placed_step(program)
        region = fast_jit(placement.gradient(make_local_loss(program)))
        _, grads = region(state.params, state.balance, batch, whole)
        results = {f"gradient {name}": np.array(x) for name, x in grads.items()}
        for number in range(steps):
            state, metrics = step(state, batch, whole)
            results[f"loss {number}"] = np.array(metrics["loss"])
        after = {**leaves(state.params), **leaves(merged(whole, state.params, LORA.scale))} if steps else {}
        return results | {f"after {name}": x for name, x in after.items()}


def run_layouts(names, steps):
    return {name: run_layout(FOUR[name], steps=steps) for name in names}


@functools.cache
def alone(steps):
    return run_layout(ParallelConfig(), devices=1, steps=steps)


def check_layouts(names, steps):
    for name, results in on_devices(4, "tests.train.test_lora:run_layouts", names, steps).items():
        assert results.keys() == alone(steps).keys()
        for key, value in alone(steps).items():
            np.testing.assert_allclose(results[key], value, rtol=1e-8, atol=1e-8 * np.abs(value).max(initial=0),
                                       err_msg=f"{name} {key}")  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(FOUR))
def test_every_layout_gives_what_one_device_gives(name):
    check_layouts([name], 2)


def test_adapters_and_base_lie_as_the_table_says():
    parallel = ParallelConfig(fsdp=2, expert=2)
    config = change(WIDE, {"lora": LORA, "init_from": "a run", "train.compute_dtype": "bfloat16", "parallel": parallel,
                           "train.batch.micro_batch": 4})  # fmt: skip
    placement = simulated_programs(config, 4)[0].placement
    a, b, whole = (placement.leaves[f"blocks.0.mixture.experts.down{part}"] for part in (".lora_a", ".lora_b", ""))
    assert a.own == b.own == whole.own == ("expert",)
    assert a.experts_over == b.experts_over == whole.experts_over == ("fsdp",)  # each device has whole adapters
    a, b = (placement.leaves[f"blocks.0.attention.query{part}"] for part in (".lora_a", ".lora_b"))
    assert a.axis == -2  # rows of A and columns of B: the rank is never split
    assert b.axis == -1
    names = [f"blocks.0.mixture.experts.down{part}" for part in (".lora_a", ".lora_b", "")]
    assert [placement.dtypes[name].name for name in names] == ["float32", "float32", "bfloat16"]
