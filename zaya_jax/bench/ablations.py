"""What the parts of ZAYA1 are worth: held-out loss with each of them taken away, at the same FLOPs."""

import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from zaya_jax.bench.plot import draw_lines
from zaya_jax.bench.sweep import CONTEXT, Trial, run_trials, small_config
from zaya_jax.config import Config, ModelConfig
from zaya_jax.machine.result import check_request, describe_run, write_result

_SEEDS = (0, 1, 2)


def variants(model: ModelConfig) -> dict[str, ModelConfig]:
    """The whole model, and it without each of three parts."""
    return {
        "zaya1": model,
        "gqa": replace(model, attention="gqa"),
        "linear router": replace(model, router="linear"),
        "no residual scaling": replace(model, residual_scaling=False),
    }


def bench_ablations(steps: int, output: str | None, png: str | None) -> dict[str, Any]:
    """Train each variant with the FLOPs that `steps` steps of the whole model take, on three seeds.

    Args:
      steps: of the whole model.
      output: a JSON file.
      png: a picture of the curves.
    """
    from zaya_jax.model.arithmetic import total_parameters, training_flops_per_token

    check_request(steps, output)
    result = describe_run(
        "held-out loss at equal FLOPs, each part of ZAYA1 taken away in turn",
        f"1.65M parameters, {steps} steps of 2,048 tokens of the embedded corpus for the whole model",
        "the whole model", ("zaya-jax", "jax", "jaxlib", "optax"),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        whole = small_config(Path(folder), steps).model
        flops = {name: training_flops_per_token(model, CONTEXT) for name, model in variants(whole).items()}
        count = {name: round(steps * flops["zaya1"] / flops[name]) for name in flops}

        def config(name: str, seed: int) -> Config:
            return small_config(Path(folder), count[name], seed, model=variants(whole)[name])

        trials = {(name, seed): Trial(f"{name} seed {seed}", config(name, seed), _look(count[name]))
                  for name in flops for seed in _SEEDS}  # fmt: skip
        curves = dict(zip(trials, run_trials(list(trials.values()), print), strict=True))
    result["results"] = {
        name: {
            "parameters": total_parameters(variants(whole)[name]),
            "flops_per_token": round(flops[name]),
            "steps": count[name],
            "heldout_loss": [round(curves[name, seed].final, 4) for seed in _SEEDS],
            "over_zaya1": round(statistics.mean(curves[name, seed].final - curves["zaya1", seed].final
                                                for seed in _SEEDS), 4),
        }
        for name in flops
    }  # fmt: skip
    for name, row in result["results"].items():
        print(f"{name}: held-out {statistics.mean(row['heldout_loss']):.4f} nats/token, {row['over_zaya1']:+.4f}")
    if png:
        lines = {trials[key].name: tuple(zip(*curve.heldout, strict=True)) for key, curve in curves.items()}
        draw_lines(Path(png), lines, x="step", y="held-out loss (nats/token)")
    write_result(result, output)
    return result


def _look(steps: int) -> int:
    """The number of steps between two looks that has the last step looked at: the divisor nearest to ten."""
    return min((n for n in range(1, steps + 1) if steps % n == 0), key=lambda n: abs(n - 10))
