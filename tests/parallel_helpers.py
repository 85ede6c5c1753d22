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
def start(dtype: ComputeDtype) -> Any:
    """The state that every layout begins with, on one device."""
    config = dataclasses.replace(WIDE, train=dataclasses.replace(WIDE.train, compute_dtype=dtype))
    route = uneven if dtype == "float64" else forced
    program = make_program(config)
    return fast_jit(lambda: route(init_state(program)))()


def run_layout(
    parallel: ParallelConfig, devices: int = 8, gradient: bool = True, dtype: ComputeDtype = "float64",
    micro_batch: int | None = 8,
) -> ThreeSteps:  # fmt: skip
    """Three steps of `WIDE` on a layout, and where asked for the gradient by itself, compiled on its own.

    In fp64 tokens choose their experts; in fp32 and bf16 rounding would flip choices, and so they are forced.
    """
    with jax.enable_x64(dtype == "float64"):
        batch = dataclasses.replace(WIDE.train.batch, micro_batch=micro_batch)
        train = dataclasses.replace(WIDE.train, compute_dtype=dtype, batch=batch)
        config = dataclasses.replace(WIDE, parallel=parallel, train=train)
        config.check()
        program = make_program(config, devices)
        state = jax.device_put(start(dtype), program.placement.shardings(start(dtype)))
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
