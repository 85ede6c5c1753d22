"""The same small model on many layouts, in double precision."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from tests.train_helpers import CONFIG, fast_jit, leaves, make_program, placed_step
from zaya_jax.config import BatchConfig, Config, OptimizerConfig, ParallelConfig
from zaya_jax.config.optimizer import ComputeDtype
from zaya_jax.train.state import init_state
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
def start(dtype: ComputeDtype, optimizer: OptimizerConfig = WIDE.optimizer) -> Any:
    """The state that every layout begins with, on one device."""
    train = dataclasses.replace(WIDE.train, compute_dtype=dtype)
    config = dataclasses.replace(WIDE, train=train, optimizer=optimizer)
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
    batch = dataclasses.replace(WIDE.train.batch, micro_batch=micro_batch)
    train = dataclasses.replace(WIDE.train, compute_dtype=dtype, batch=batch)
    return run_config(dataclasses.replace(WIDE, parallel=parallel, train=train), devices, gradient)[0]


def run_config(config: Config, devices: int, gradient: bool = False) -> tuple[ThreeSteps, str]:
    """See `run_layout`; also the HLO of the step."""
    dtype = config.train.compute_dtype
    with jax.enable_x64(dtype == "float64"):
        config.check()
        program = make_program(config, devices)
        state = start(dtype, config.optimizer)
        state = jax.device_put(state, program.placement.shardings(state))
        # The CPU code of a quick compilation lacks products of bf16.
        step, batch = placed_step(program, jax.jit if dtype == "bfloat16" else fast_jit)
        sums, grads = {}, {}
        if gradient:
            region = fast_jit(program.placement.gradient(make_local_loss(program)))
            sums, grads = jax.device_get(region(state.params, state.balance, batch))
        steps = ThreeSteps([], [], [], [], [], sums, grads)
        step = step.lower(state, batch).compile()
        for _ in range(3):
            state, metrics = step(state, batch)
            steps.losses.append(float(metrics["loss"]))
            steps.tokens.append(float(metrics["tokens"]))
            steps.skip_rates.append(np.array(metrics["skip_rate"]))
            steps.max_loads.append(np.array(metrics["max_load"]))
            steps.states.append(leaves(state))
        return steps, step.as_text() or ""


def run_layouts(names: list[str], gradient: bool, dtype: ComputeDtype = "float64") -> dict[str, ThreeSteps]:
    """`run_layout` of some of `LAYOUTS`, in this process; "single NAME" has one micro-batch."""
    return {name: run_layout(LAYOUTS[name.removeprefix(SINGLE)], gradient=gradient, dtype=dtype,
                             micro_batch=None if name.startswith(SINGLE) else 8) for name in names}  # fmt: skip
