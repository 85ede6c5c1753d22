"""Train many small models, one on each core, and return their learning curves, without run folders."""

import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from zaya_jax.config import Config, load_config
from zaya_jax.config.checks import require
from zaya_jax.config.shipped import shipped
from zaya_jax.config.stages import stages
from zaya_jax.data.prepare.workers import end_with_parent
from zaya_jax.hardware.environment import keep_compilations
from zaya_jax.lab.result import describe_run

CONTEXT = 128
BATCH = 2048  # tokens a step
SEEDS = (0, 1, 2)


class Trial(NamedTuple):
    """A training to run."""

    name: str
    config: Config  # its `run_dir` is not used
    evaluation_interval: int = 10  # steps between evaluations of the held-out loss
    router_offset: float = 0.0  # initial offset of the router's logits of the first two experts


class Curve(NamedTuple):
    """The result of a training."""

    heldout: list[tuple[int, float]]  # pairs of a step and the held-out loss after it, nats/token
    entropy: list[float]  # normalized entropy of the expert load at each step, averaged over layers
    seconds: float  # duration

    @property
    def final(self) -> float:
        """The last held-out loss."""
        return self.heldout[-1][1]


def small_config(cache: Path, steps: int, seed: int = 0, batch: int = BATCH, **changes: Any) -> Config:
    """Make a configuration with 1.65M parameters, the default text corpus, and constant rates after a short warm-up.

    A step has `batch` tokens, a multiple of the micro-batch's `BATCH`; `changes` replace sections.
    """
    overrides = (
        "model.vocab_size=2048 model.hidden_size=128 model.num_layers=3 model.num_query_heads=4 model.num_kv_heads=2 "
        f"model.head_dim=32 model.router_size=32 model.max_positions={CONTEXT} data.context={CONTEXT} seed={seed} "
        f"phases.0.tokens={steps * batch} phases.0.schedule.shape=constant "
        f"phases.0.schedule.warmup_tokens={10 * batch} phases.0.schedule.final=0.1 "
        f"optimizer.muon.learning_rate=0.02 optimizer.adamw.learning_rate=0.018 train.batch.tokens={batch} "
        f"train.batch.micro_batch={BATCH // CONTEXT} evaluation.batch_size=32 evaluation.batches=8"
    )
    config = load_config(shipped("tiny.yaml"), [*overrides.split(), f"data.cache_dir={cache}"])
    config = replace(config, **changes)
    config.check()
    return config


def start_result(what: str, size: str, peer: str, steps: int) -> dict[str, Any]:
    """Make the header of a result of trainings with `small_config`; InputError if --steps are too few."""
    require(steps >= 20, "--steps", steps, "at least 20: the warm-up takes 10 steps")
    keep_compilations()  # the seeds of a variant run the same programs
    return describe_run(what, f"1.65M parameters, {size}", peer, ("optax",))


def run_trials(trials: Mapping[Any, Trial]) -> dict[Any, Curve]:
    """Run all trials, one on each core at a time, and print a line for each, in order."""
    cores = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    free = context.SimpleQueue()
    for core in cores:
        free.put(core)
    curves = {}
    with ProcessPoolExecutor(len(cores), context, _take_core, (free, os.getpid())) as pool:
        for (key, trial), curve in zip(trials.items(), pool.map(run_trial, trials.values()), strict=True):
            print(f"{trial.name}: held-out {curve.final:.4f} nats/token, {curve.seconds:.0f} s", flush=True)
            curves[key] = curve
    return curves


def _take_core(free: Any, parent: int) -> None:
    end_with_parent(parent)
    os.sched_setaffinity(0, {free.get()})


def median_or_never(values: Sequence[float | None]) -> float | None:
    """Return the median of an odd number of values, where None counts as infinite."""
    return sorted(values, key=lambda value: (value is None, value))[len(values) // 2]


def run_trial(trial: Trial) -> Curve:
    """Train through all phases, as a run does, and evaluate the held-out loss at intervals."""
    import jax

    from zaya_jax.data.loading.batches import train_batches
    from zaya_jax.data.loading.sources import open_sources
    from zaya_jax.evaluate.evaluator import ModelSnapshot
    from zaya_jax.evaluate.heldout import HeldoutEvaluator
    from zaya_jax.parallel.kernels import validated_kernels
    from zaya_jax.train.compiled import CompiledSteps
    from zaya_jax.train.program import Programs
    from zaya_jax.train.state import init_state

    start, config = time.monotonic(), trial.config
    programs = Programs(config, validated_kernels(config))
    program = programs[0]
    prepared = open_sources(config)
    evaluator = HeldoutEvaluator(config, prepared)
    state = jax.jit(lambda: init_state(program))()
    state = jax.device_put(state, program.placement.shardings(state))
    state = replace(state, params=_offset_routers(state.params, trial.router_offset))
    heldout, entropy, step = [], [], 0
    with train_batches(config, prepared) as batches, CompiledSteps(programs) as compiled:
        for stage in stages(config):
            train_step, program = compiled.step(stage), programs[stage.phase]
            count, placement = program.batch_shape(stage)[0], program.placement
            while step < stage.end:
                state, metrics = train_step(state, placement.place(next(batches), count), {})
                step += 1
                entropy.append(float(metrics["load_entropy"].mean()))
                if step % trial.evaluation_interval == 0:
                    loss_sums = compiled.evaluation(stage.phase)
                    arrays = state.params, state.balance, {}
                    evaluator.evaluate(ModelSnapshot(*arrays, placement, loss_sums, stage.phase))
                    heldout.append((step, evaluator.total.nats_per_token))
    return Curve(heldout, [round(value, 5) for value in entropy], round(time.monotonic() - start, 1))


def _offset_routers(params: dict[str, Any], offset: float) -> dict[str, Any]:
    """Change the routers so that they add `offset` to the logits of the first two experts for every token."""
    import jax

    new = dict(params)
    for name, output in params.items():
        if offset and name.endswith("router.output") and name.replace("output", "hidden2_bias") in params:
            bias = name.replace("output", "hidden2_bias")
            new[bias] = params[bias] + 1.0  # gives the input of the output matrix a mean
            mean = float(jax.nn.gelu(1.0, approximate=False)) * output.shape[-2]
            new[name] = output.at[..., :2].add(offset / mean)
    return new
