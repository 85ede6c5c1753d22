"""Ablations: held-out loss with one part of ZAYA1 removed at a time, at equal FLOPs."""

import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from zaya_jax.bench.sweep import CONTEXT, PACKAGES, SEEDS, SIZE, Trial, draw_heldout, run_trials, small_config
from zaya_jax.config import Config, ModelConfig
from zaya_jax.machine.result import describe_run


def variants(model: ModelConfig) -> dict[str, ModelConfig]:
    """Return the whole model, and variants that replace or remove one of three parts, by name."""
    return {
        "zaya1": model,
        "gqa": replace(model, attention="gqa"),
        "linear router": replace(model, router="linear"),
        "no residual scaling": replace(model, residual_scaling=False),
    }


def bench_ablations(steps: int, png: str | None) -> dict[str, Any]:
    """Train each variant with the FLOPs of `steps` steps of the whole model, with three seeds.

    Args:
      steps: training steps of the whole model.
      png: file for a plot of the curves; None for no plot.
    """
    from zaya_jax.model.arithmetic import total_parameters, training_flops_per_token

    result = describe_run(
        "held-out loss at equal FLOPs, with one part of ZAYA1 removed at a time",
        f"{SIZE}, {steps} steps of 2,048 tokens of the text corpus for the whole model",
        "the whole model", PACKAGES,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        models = variants(small_config(Path(folder), steps).model)
        flops = {name: training_flops_per_token(model, CONTEXT) for name, model in models.items()}
        count = {name: round(steps * flops["zaya1"] / flops[name]) for name in flops}

        def config(name: str, seed: int) -> Config:
            return small_config(Path(folder), count[name], seed, model=models[name])

        trials = {(name, seed): Trial(f"{name} seed {seed}", config(name, seed), evaluation_interval(count[name]))
                  for name in flops for seed in SEEDS}  # fmt: skip
        curves = run_trials(trials)
    final = {name: [curves[name, seed].final for seed in SEEDS] for name in models}
    result["results"] = {
        name: {
            "parameters": total_parameters(model),
            "flops_per_token": round(flops[name]),
            "steps": count[name],
            "heldout_loss": [round(loss, 4) for loss in final[name]],
            "over_zaya1": round(statistics.mean(final[name]) - statistics.mean(final["zaya1"]), 4),
        }
        for name, model in models.items()
    }
    for name, row in result["results"].items():
        print(f"{name}: held-out loss {statistics.mean(row['heldout_loss']):.4f} nats/token, {row['over_zaya1']:+.4f} "
              "against ZAYA1")  # fmt: skip
    draw_heldout(png, {trials[key].name: curve for key, curve in curves.items()}, "Ablations at equal FLOPs")
    return result


def evaluation_interval(steps: int) -> int:
    """Return the divisor of `steps` closest to 10, so that the last step is evaluated."""
    return min((n for n in range(1, steps + 1) if steps % n == 0), key=lambda n: abs(n - 10))
