"""The same small model on many layouts, in double precision."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from tests.helpers import random_values
from tests.train_helpers import CONFIG, fast_jit, leaves, make_program, placed_step
from zaya_jax.config import BatchConfig, Config, ParallelConfig
from zaya_jax.config.optimizer import ComputeDtype
from zaya_jax.train.state import TrainState, init_counters, init_state
from zaya_jax.train.step import make_local_loss

# Every device has a sequence of each of two micro-batches, every expert rank experts, every piece a few tokens.
WIDE = dataclasses.replace(
    CONFIG,
    model=dataclasses.replace(CONFIG.model, num_experts=8, hidden_size=32, expert_size=32),
    train=dataclasses.replace(CONFIG.train, compute_dtype="float64", batch=BatchConfig(tokens=16 * 32, micro_batch=8)),
)
LAYOUTS = {
    "data": ParallelConfig(),
    "micro_batch": ParallelConfig(gradient_reduction="micro_batch"),
    "fsdp": ParallelConfig(fsdp=8),
    "hybrid": ParallelConfig(data=2, fsdp=4),
    "expert2": ParallelConfig(expert=2),
    "expert4": ParallelConfig(expert=4),
    "expert8": ParallelConfig(expert=8),
    **{
        f"{attention}_{layout}{context}": ParallelConfig(
            context=context, context_attention=attention, context_layout=layout
        )
        for context in (2, 4, 8)
        for attention in ("all_gather", "ring")
        for layout in ("contiguous", "zigzag")
    },
    "fsdp_expert_context": ParallelConfig(fsdp=2, expert=2, context=2),
    "data_fsdp_ring": ParallelConfig(data=2, fsdp=2, context=2, context_attention="ring"),
    "data_fsdp_expert": ParallelConfig(data=2, fsdp=2, expert=2, gradient_reduction="micro_batch"),
}
# Of one and more degrees that are no powers of two, on up to twelve devices.
ODD = {
    "data3_fsdp2": ParallelConfig(data=3, fsdp=2),
    "data3_fsdp4": ParallelConfig(data=3, fsdp=4, gradient_reduction="micro_batch"),
    "data5_fsdp2": ParallelConfig(data=5, fsdp=2),
    "data2_expert3_fsdp2": ParallelConfig(data=2, expert=3, fsdp=2),
    "data3_fsdp2_context2": ParallelConfig(data=3, fsdp=2, context=2),
    "data3_fsdp2_ring2": ParallelConfig(data=3, fsdp=2, context=2, context_attention="ring"),
    "expert3_fsdp2_context2": ParallelConfig(expert=3, fsdp=2, context=2),
    "data2_fsdp3": ParallelConfig(data=2, fsdp=3),
    "data2_fsdp5": ParallelConfig(data=2, fsdp=5),
    "data2_fsdp6": ParallelConfig(data=2, fsdp=6),
    "data2_expert6": ParallelConfig(data=2, expert=6),
    "data2_context3": ParallelConfig(data=2, context=3),
    "fsdp3_ring3": ParallelConfig(data=1, fsdp=3, context=3, context_attention="ring"),
}
# Of the model: axes that few, that all, and that no such degrees divide; six experts, which one optimizer or the other
# updates, and which are computed again or not.
ODD_SIZES = {"32": (32, "muon", "full"), "60": (60, "muon", "dots"), "31": (31, "adamw", "none")}
SINGLE = "single "


class ThreeSteps(NamedTuple):
    """The metrics of three steps and the states after them; of the start its sums and its gradient."""

    losses: list[float]
    tokens: list[float]
    skip_rates: list[np.ndarray]
    max_loads: list[np.ndarray]
    states: list[dict[str, np.ndarray]]  # after the first step, momentum is the gradient
    sums: dict[str, np.ndarray]
    gradient: dict[str, np.ndarray]


def uneven(state: Any) -> Any:
    """A state in which some tokens skip and experts are chosen unevenly."""
    balance = {name: bias.at[..., 0].add(0.05).at[..., -1].add(1.12) for name, bias in state.balance.items()}
    return dataclasses.replace(state, balance=balance)


def forced(state: Any) -> Any:
    """A state in which rounding changes no choice: all tokens go to one expert."""
    return dataclasses.replace(state, balance={name: bias.at[..., 2].add(9) for name, bias in state.balance.items()})


@functools.cache
def start(config: Config) -> Any:
    """The state that every layout of a model begins with, on one device."""
    route = uneven if config.train.compute_dtype == "float64" else forced
    program = make_program(config)
    return fast_jit(lambda: route(init_state(program)))()


def run_layout(
    parallel: ParallelConfig, devices: int = 8, gradient: bool = True, dtype: ComputeDtype = "float64",
    micro_batch: int | None = 8,
) -> ThreeSteps:  # fmt: skip
    """`three_steps` of `WIDE`; in fp64 tokens choose their experts, in fp32 and bf16 rounding would flip choices."""
    batch = dataclasses.replace(WIDE.train.batch, micro_batch=micro_batch)
    train = dataclasses.replace(WIDE.train, compute_dtype=dtype, batch=batch)
    return three_steps(dataclasses.replace(WIDE, train=train), parallel, devices, gradient)


def three_steps(config: Config, parallel: ParallelConfig, devices: int, gradient: bool) -> ThreeSteps:
    """Three steps of a configuration on a layout, and where asked for the gradient by itself, compiled on its own."""
    dtype = config.train.compute_dtype
    with jax.enable_x64(dtype == "float64"):
        first, config = start(config), dataclasses.replace(config, parallel=parallel)
        config.check()
        program = make_program(config, devices)
        state = jax.device_put(first, program.placement.shardings(first))
        # The CPU code of a quick compilation lacks products of bf16.
        step, batch = placed_step(program, jax.jit if dtype == "bfloat16" else fast_jit)
        sums, grads = {}, {}
        if gradient:
            region = fast_jit(program.placement.gradient(make_local_loss(program)))
            sums, grads = jax.device_get(region(state.params, state.balance, batch))
        steps = ThreeSteps([], [], [], [], [], sums, grads)
        for _ in range(3):
            state, metrics = step(state, batch)
            steps.losses.append(float(metrics["loss"]))
            steps.tokens.append(float(metrics["tokens"]))
            steps.skip_rates.append(np.array(metrics["skip_rate"]))
            steps.max_loads.append(np.array(metrics["max_load"]))
            steps.states.append(leaves(state))
        return steps


def odd_config(sizes: str) -> Config:
    """`WIDE` with `ODD_SIZES`, and two micro-batches that all layouts of `ODD` divide; "single SIZES" has one."""
    width, matrices, remat = ODD_SIZES[sizes.removeprefix(SINGLE)]
    batch = BatchConfig(tokens=120 * 36, micro_batch=None if sizes.startswith(SINGLE) else 60)
    return dataclasses.replace(
        WIDE, data=dataclasses.replace(WIDE.data, context=36),
        model=dataclasses.replace(WIDE.model, num_experts=6, hidden_size=width, expert_size=width),
        optimizer=dataclasses.replace(WIDE.optimizer, matrices=matrices),
        train=dataclasses.replace(WIDE.train, batch=batch, remat=remat),
    )  # fmt: skip


def run_odd(name: str, sizes: str) -> ThreeSteps:
    """`three_steps` on a layout of `ODD`, of the gradient none."""
    parallel = ODD[name]
    devices = (parallel.data or 1) * parallel.fsdp * parallel.expert * parallel.context
    return three_steps(odd_config(sizes), parallel, devices, gradient=False)


class Step(NamedTuple):
    """The metrics of a step, the state after it, and its HLO."""

    metrics: dict[str, np.ndarray]
    state: dict[str, np.ndarray]
    text: str


def run_step(config: Config, devices: int) -> Step:
    """A step of `config` in fp64 on so many devices, from parameters at random."""
    with jax.enable_x64(True):
        config.check()
        program, values = make_program(config, devices), random_values(config.model)
        state, bias = program.abstract_state, np.zeros(config.model.num_experts + 1)
        bias[0], bias[-1] = 0.6, 0.7  # so that many tokens skip, and more of the others choose the first expert
        kinds = ("params", "balance", "opt_state", "balance_state")
        drawn = {kind: jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), getattr(state, kind)) for kind in kinds}
        drawn["params"] = {name: np.asarray(values[name], x.dtype) for name, x in state.params.items()}
        drawn["balance"] = {name: np.broadcast_to(bias, x.shape).astype(x.dtype) for name, x in state.balance.items()}
        start = TrainState(**drawn, **init_counters(config))
        step, batch = placed_step(program)
        state = jax.device_put(start, program.placement.shardings(start))
        compiled = step.lower(state, batch).compile()
        state, metrics = compiled(state, batch)
        return Step(jax.device_get(metrics), leaves(state), compiled.as_text() or "")


def gradient_text(config: Config) -> str:
    """The HLO of the gradient of the loss of `config`, in fp64, on the devices of this process."""
    with jax.enable_x64(True):
        program = make_program(config, jax.device_count())
        state, (_, batch) = program.abstract_state, placed_step(program)
        region = fast_jit(program.placement.gradient(make_local_loss(program)))
        return region.lower(state.params, state.balance, batch).compile().as_text() or ""


def run_layouts(names: list[str], gradient: bool, dtype: ComputeDtype = "float64") -> dict[str, ThreeSteps]:
    """`run_layout` of some of `LAYOUTS`, in this process; "single NAME" has one micro-batch."""
    return {name: run_layout(LAYOUTS[name.removeprefix(SINGLE)], gradient=gradient, dtype=dtype,
                             micro_batch=None if name.startswith(SINGLE) else 8) for name in names}  # fmt: skip
