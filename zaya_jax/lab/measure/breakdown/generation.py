"""Trace the processing of prompts, or the steps that draw tokens, of a configuration with random parameters."""

import functools
import statistics
from pathlib import Path
from typing import Literal

import jax

from zaya_jax.config import ModelConfig
from zaya_jax.config.schema import ProfileConfig
from zaya_jax.generate.decode import BLOCK, compile_generation
from zaya_jax.hardware.environment import step_options
from zaya_jax.lab.measure.breakdown.trace import Trace, read_trace
from zaya_jax.lab.timing import timed
from zaya_jax.model.tree import compute_dtypes, map_variables, roles
from zaya_jax.model.zaya import Zaya
from zaya_jax.ops.target import GPU_PLATFORMS, current_target
from zaya_jax.run.folder import PROFILE
from zaya_jax.train.profiler import StepProfiler
from zaya_jax.train.program import known_options

Work = Literal["prefill", "decode"]


def trace_generation(
    model: ModelConfig, dtype: str, work: Work, batch: int, prompt: int, repeats: int, folder: Path
) -> tuple[Trace, float, int, int]:
    """Trace `repeats` prompts, or blocks of decode steps after one, on the first device.

    Args:
      model: the architecture.
      dtype: compute dtype.
      work: what to trace.
      batch: number of prompts that are processed together.
      prompt: tokens of each.
      repeats: number of prompts or blocks.
      folder: for the trace.

    Returns:
      A trace of `Trace.steps` prompts or decode steps; the median seconds of one without the profiler; tokens of a
      prompt, rounded up to whole chunks; and how often a prompt or decode step runs the program that was traced, whose
      loop counts once.

    Raises:
      InputError: prompt and new tokens exceed `model.max_positions`.
    """
    blocks = 2 * repeats + 1 if work == "decode" else 0
    options = known_options(step_options(traced=current_target().platform in GPU_PLATFORMS))
    programs = compile_generation(_random_model(model, dtype), batch, prompt, blocks, options)
    length = programs.chunks[0][0].shape[1] * len(programs.chunks)
    window = StepProfiler(ProfileConfig(1, repeats), folder, lambda _: None)
    if work == "prefill":
        caches = [programs.empty_cache() for _ in range(2 * repeats + 1)]

        def call() -> object:
            return programs.prompt(caches.pop())[1]

        compiled, count = programs.prefill, 1
    else:
        state = programs.start(*programs.prompt(programs.empty_cache()))

        def call() -> object:
            nonlocal state
            state, *_ = programs.decode(programs.model, state, programs.block)
            return state

        compiled, count = programs.decode, BLOCK
    untraced = statistics.median(timed(lambda: jax.block_until_ready(call()), repeats)) / count
    window.start(0, None, compiled)
    out = None
    for _ in range(repeats):
        out = call()
    window.stop(repeats, out)
    trace = read_trace(folder / PROFILE, f"jit__{work}")
    calls = len(programs.chunks) if work == "prefill" else 1
    return trace._replace(steps=repeats * count), untraced, length, calls


@functools.partial(jax.jit, static_argnums=(0, 1))
def _random_model(config: ModelConfig, dtype: str) -> Zaya:
    model = Zaya(config, jax.random.key(0))
    dtypes = compute_dtypes(roles(model), dtype)
    return map_variables(model, lambda name, x: x.astype(dtypes.get(name, x.dtype)))
