"""Ablations: held-out loss with one part of ZAYA1 or its recipe changed, at equal FLOPs and the best learning rates."""

import argparse
import math
import os
import queue
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.benchmark_command import command, flag, training_process
from zaya_jax.config import load_config
from zaya_jax.config.checks import require
from zaya_jax.config.shipped import shipped
from zaya_jax.errors import RunStopped
from zaya_jax.lab.result import describe_run
from zaya_jax.lab.result_plots import draw_spread
from zaya_jax.run.folder import METRICS
from zaya_jax.run.metrics import read_rows

WHOLE = "ZAYA1"
CONTEXT, BATCH = 128, 2048  # tokens of a row, and of a step
SEEDS = (0, 1, 2)
MULTIPLIERS = (0.5, 1.0, 2.0)  # of all learning rates; the grid grows while the best is at its edge
_MAX_EXTENSIONS = 2  # of the grid
_RATES = {"muon": 0.02, "adamw": 0.018}
_OF_MATRICES = [f"optimizer.roles.{role}.learning_rate=0.1" for role in ("attention", "router", "expert")]
# What each variant changes in the whole model and its recipe.
VARIANTS = {
    WHOLE: [],
    "GQA": ["model.attention=gqa"],
    "GQA with QK-norm": ["model.attention=gqa_qk_norm"],
    "no convolutions": ["model.convolutions=false"],
    "no QK-mean": ["model.query_key_mean=false"],
    "no value shift": ["model.value_shift=false"],
    "no depth averaging": ["model.depth_averaging=false"],
    "router MLP of one layer": ["model.router_layers=1"],
    "linear router": ["model.router=linear"],
    "no residual scaling": ["model.residual_scaling=false"],
    "AdamW for matrices": ["optimizer.matrices=adamw", *_OF_MATRICES],
    "balancing by sign": ["optimizer.balance.rule=sign"],
    "no balancing": ["optimizer.balance.rule=none"],
}
_SMALL = (
    "model.vocab_size=2048 model.hidden_size=128 model.num_layers=3 model.num_query_heads=4 model.num_kv_heads=2 "
    f"model.head_dim=32 model.router_size=32 model.max_positions={CONTEXT} data.context={CONTEXT} "
    "phases.0.packing=windows phases.0.schedule.final=0.1 optimizer.muon.newton_schulz_steps=5 "
    "optimizer.muon.coefficients=standard optimizer.muon.gate_up=joint "
    f"train.batch.tokens={BATCH} train.batch.micro_batch={BATCH // CONTEXT} "
    "evaluation.every=1000000 evaluation.batch_size=32 evaluation.batches=8 checkpoint.every=1000000 sample.tokens=0"
)
Key = tuple[str, float, int]  # a variant, a multiplier and a seed


def run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Compare held-out loss at equal FLOPs with one part of ZAYA1 or its recipe changed at a time.

    Trains models of 1.65M parameters with three seeds, one training per core, by zaya_jax.main. The learning rates of
    each variant are tuned on the first seed.

    ablations --steps 100 --only 'no value shift' 'AdamW for matrices' --png ablations.png
    """
    from zaya_jax.model.arithmetic import total_parameters, training_flops_per_token

    require(parsed.steps >= 10, "--steps", parsed.steps, "at least 10")
    for name in parsed.only:
        require(name in VARIANTS, "--only", name, f"one of {', '.join(VARIANTS)}")
    size = f"1.65M parameters, {parsed.steps} steps of {BATCH:,} tokens of the text corpus for the whole model"
    what = "held-out loss at equal FLOPs, with one part changed at a time, each at its best learning rates"
    result = describe_run(what, f"{size}, cosine schedule", "the whole model with the same seed", ("optax",))
    names = dict.fromkeys([WHOLE, *(parsed.only or VARIANTS)])
    models = {name: load_config(shipped("tiny.yaml"), changes(name)).model for name in names}
    flops = {name: training_flops_per_token(model, CONTEXT) for name, model in models.items()}
    count = {name: round(parsed.steps * flops[WHOLE] / flops[name]) for name in names}
    with tempfile.TemporaryDirectory() as folder:

        def train(keys: Sequence[Key]) -> dict[Key, float]:
            return run_trials({key: changes(*key, count[key[0]]) for key in keys}, Path(folder))

        tuning = tune([*names], train)
        best = {name: _best(losses) for name, losses in tuning.items()}
        others = train([(name, best[name], seed) for name in names for seed in SEEDS[1:]])
    final = {
        name: [tuning[name][best[name]], *(others[name, best[name], seed] for seed in SEEDS[1:])] for name in names
    }
    over = {name: [loss - whole for loss, whole in zip(final[name], final[WHOLE], strict=True)] for name in names}
    result["results"] = {
        name: {
            "parameters": total_parameters(model),
            "flops_per_token": round(flops[name]),
            "steps": count[name],
            "heldout_loss_by_multiplier": {f"{m:g}": round(loss, 4) for m, loss in sorted(tuning[name].items())},
            "multiplier": best[name],
            "interior": min(tuning[name]) < best[name] < max(tuning[name]),
            "heldout_loss": [round(loss, 4) for loss in final[name]],
            "over_zaya1": [round(loss, 4) for loss in over[name]],
            "mean_over_zaya1": round(statistics.mean(over[name]), 4),
        }
        for name, model in models.items()
    }
    for name, losses in over.items():
        spread = f"{statistics.mean(losses):+.4f} ({min(losses):+.4f} to {max(losses):+.4f}) against {WHOLE}"
        print(f"{name}: held-out loss {statistics.mean(final[name]):.4f} nats/token, {spread}")
    if parsed.png:
        del over[WHOLE]
        title, x = f"Ablations at equal FLOPs (mean and {len(SEEDS)} seeds)", "held-out loss above ZAYA1 (nats/token)"
        draw_spread(Path(parsed.png), over, title=title, x=x)
    return result


def changes(name: str, multiplier: float = 1.0, seed: int = 0, steps: int = 100) -> list[str]:
    """Return what a training of a variant changes in `configs/tiny.yaml`."""
    rates = [f"optimizer.{each}.learning_rate={multiplier * rate:g}" for each, rate in _RATES.items()]
    length = [f"phases.0.tokens={steps * BATCH}", f"phases.0.schedule.warmup_tokens={steps // 10 * BATCH}"]
    return [*_SMALL.split(), f"seed={seed}", *length, *rates, *VARIANTS[name]]


def run_trials(trials: Mapping[Key, Sequence[str]], folder: Path) -> dict[Key, float]:
    """Train with each list of overrides, on one core at a time each; return the held-out losses at the end.

    A training that fails, such as one that diverges, has an infinite loss. Prepared data is kept in `folder`.
    """
    free = queue.SimpleQueue[int]()
    for core in (cores := sorted(os.sched_getaffinity(0))):
        free.put(core)

    def train(key: Key) -> float:
        core = free.get()
        run = folder / f"{key[0]} {key[1]:g} {key[2]}"
        try:
            with training_process(
                shipped("tiny.yaml"), *trials[key], f"run_dir={run}", f"data.cache_dir={folder}"
            ) as it:
                os.sched_setaffinity(it.pid, {core})  # before jax asks for its cores
                it.wait()
            loss = read_rows(run / METRICS)[-1]["heldout_loss"]
        except RunStopped as error:
            print(error, flush=True)
            loss = math.inf
        finally:
            free.put(core)
        print(f"{key[0]} x{key[1]:g} seed {key[2]}: held-out {loss:.4f} nats/token", flush=True)
        return loss

    with ThreadPoolExecutor(len(cores)) as pool:
        return dict(zip(trials, pool.map(train, trials), strict=True))


def tune(names: Sequence[str], train: Callable[[Sequence[Key]], dict[Key, float]]) -> dict[str, dict[float, float]]:
    """Try multipliers of learning rates, further ones while the best is at the edge; returns loss by variant and it."""
    losses: dict[str, dict[float, float]] = {name: {} for name in names}
    keys = [(name, multiplier, SEEDS[0]) for name in names for multiplier in MULTIPLIERS]
    for _ in range(1 + _MAX_EXTENSIONS):
        for (name, multiplier, _), loss in train(keys).items():
            losses[name][multiplier] = loss
        keys = [(name, further, SEEDS[0]) for name, tried in losses.items() if (further := _further(tried))]
        if not keys:
            break
    return losses


def _best(losses: Mapping[float, float]) -> float:
    """Return the multiplier with the lowest loss; one that diverged only if all did."""
    return min(losses, key=lambda multiplier: losses[multiplier] if math.isfinite(losses[multiplier]) else math.inf)


def _further(losses: Mapping[float, float]) -> float | None:
    best = _best(losses)
    return best / 2 if best == min(losses) else best * 2 if best == max(losses) else None


FLAGS = {
    "--steps": flag(200, "N", "number of training steps of the whole model, at least 10"),
    "--only": {"nargs": "+", "default": [], "metavar": "VARIANT", "help": f"of {', '.join(VARIANTS)} (default: all)"},
}
main = command(run, FLAGS, png="differences from the whole model")
