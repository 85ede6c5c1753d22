"""Ablations: held-out loss with one part of ZAYA1 removed at a time, at equal FLOPs and the best learning rates."""

import argparse
import math
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.benchmark_command import command, flag
from benchmarks.training_sweep import BATCH, CONTEXT, SEEDS, Curve, Trial, run_trials, small_config, start_result
from zaya_jax.config import Config, ModelConfig, PhaseConfig, ScheduleConfig
from zaya_jax.lab.result_plots import draw_spread

WHOLE = "ZAYA1"
MULTIPLIERS = (0.5, 1.0, 2.0)  # of all learning rates; the grid grows while the best is at its edge
_MAX_EXTENSIONS = 2  # of the grid
Key = tuple[str, float]  # a variant and a multiplier


def variants(model: ModelConfig) -> dict[str, ModelConfig]:
    """Return the whole model, and variants that replace or remove one part, by name."""
    return {
        WHOLE: model,
        "GQA": replace(model, attention="gqa"),
        "GQA with QK-norm": replace(model, attention="gqa_qk_norm"),
        "no convolutions": replace(model, convolutions=False),
        "no QK-mean": replace(model, query_key_mean=False),
        "no value shift": replace(model, value_shift=False),
        "no depth averaging": replace(model, depth_averaging=False),
        "router MLP of one layer": replace(model, router_layers=1),
        "linear router": replace(model, router="linear"),
        "no residual scaling": replace(model, residual_scaling=False),
    }


def run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Compare held-out loss at equal FLOPs with one part of ZAYA1 removed at a time.

    Trains models of 1.65M parameters with three seeds, one training per core. The learning rates of each variant are
    tuned on the first seed.

    ablations --steps 100 --png ablations.png
    """
    from zaya_jax.model.arithmetic import total_parameters, training_flops_per_token

    what = "held-out loss at equal FLOPs, with one part of ZAYA1 removed at a time, each at its best learning rates"
    size = f"{parsed.steps} steps of {BATCH:,} tokens of the text corpus for the whole model, cosine schedule"
    result = start_result(what, size, "the whole model with the same seed", parsed.steps)
    with tempfile.TemporaryDirectory() as folder:
        models = variants(small_config(Path(folder), parsed.steps).model)
        flops = {name: training_flops_per_token(model, CONTEXT) for name, model in models.items()}
        count = {name: round(parsed.steps * flops[WHOLE] / flops[name]) for name in flops}

        def trial(name: str, multiplier: float, seed: int) -> Trial:
            config = _config(Path(folder), models[name], count[name], multiplier, seed)
            return Trial(f"{name} x{multiplier:g} seed {seed}", config, count[name])

        tuning = tune(list(models), lambda keys: run_trials({key: trial(*key, SEEDS[0]) for key in keys}))
        best = {name: _best(losses) for name, losses in tuning.items()}
        curves = run_trials({(name, seed): trial(name, best[name], seed) for name in models for seed in SEEDS[1:]})
    final = {name: [tuning[name][best[name]], *(curves[name, seed].final for seed in SEEDS[1:])] for name in models}
    over = {name: [loss - whole for loss, whole in zip(final[name], final[WHOLE], strict=True)] for name in models}
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


def tune(names: list[str], train: Callable[[list[Key]], dict[Key, Curve]]) -> dict[str, dict[float, float]]:
    """Try multipliers of learning rates, further ones while the best is at the edge; returns loss by variant and it."""
    losses: dict[str, dict[float, float]] = {name: {} for name in names}
    keys = [(name, multiplier) for name in names for multiplier in MULTIPLIERS]
    for _ in range(1 + _MAX_EXTENSIONS):
        for (name, multiplier), curve in train(keys).items():
            losses[name][multiplier] = curve.final
        keys = [(name, further) for name, tried in losses.items() if (further := _further(tried)) is not None]
        if not keys:
            break
    return losses


def _best(losses: dict[float, float]) -> float:
    """Return the multiplier with the lowest loss; one that diverged only if all did."""
    return min(losses, key=lambda multiplier: losses[multiplier] if math.isfinite(losses[multiplier]) else math.inf)


def _further(losses: dict[float, float]) -> float | None:
    best = _best(losses)
    return best / 2 if best == min(losses) else best * 2 if best == max(losses) else None


def _config(cache: Path, model: ModelConfig, steps: int, multiplier: float, seed: int) -> Config:
    phase = PhaseConfig(steps * BATCH, schedule=ScheduleConfig(final=0.1, warmup_tokens=20 * BATCH))
    config = small_config(cache, steps, seed, model=model, phases=(phase,))
    optimizer = config.optimizer
    rates = {name: getattr(optimizer, name) for name in ("muon", "adamw")}
    scaled = {name: replace(each, learning_rate=multiplier * each.learning_rate) for name, each in rates.items()}
    return replace(config, optimizer=replace(optimizer, **scaled))


STEPS = {"--steps": flag(200, "N", "number of training steps of the whole model, at least 20")}
main = command(run, STEPS, png="differences from the whole model")
