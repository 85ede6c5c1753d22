"""Compare balancing rules: steps until the expert load is even, from an uneven start and after the data changes."""

import argparse
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.benchmark_command import command, flag
from benchmarks.training_sweep import SEEDS, Curve, Trial, median_or_never, run_trials, small_config, start_result
from zaya_jax.config import Config, from_dict, to_dict
from zaya_jax.config.optimizer import BalanceRule
from zaya_jax.lab.result_plots import draw_lines

EVEN = 0.98  # normalised entropy of the load, mean over layers
ROUTER_OFFSET = 3.0  # added to the logits of two experts: e³ times the others' probability
_BATCH = 4096  # tokens a step; with half as many, noise would hide an even load
_ROUTER = 0.1  # the router's multiplier of Muon's learning rate; at 1, this small model's router outruns any bias
_HELD = 3  # steps in a row that must be even
RATES = (0.003, 0.01, 0.03, 0.1)


def run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Count the steps that each balancing rule needs to even out the expert load.

    Trains models of 1.65M parameters with three seeds, one training per core. Training starts with a skewed router, and
    the data changes half-way.

    balance --steps 100 --png balance.png
    """
    steps: int = parsed.steps
    result = start_result(
        f"steps until the normalized expert-load entropy, mean over layers, stays at or above {EVEN} for {_HELD} steps",
        f"{steps} steps of {_BATCH:,} tokens of source code, then {steps} of character tables; "
        f"at the start {ROUTER_OFFSET:g} is added to the router logits of 2 of 8 experts",
        "bias update by sign at its best rate; no balancing",
        steps,
    )
    with tempfile.TemporaryDirectory() as folder:
        sources = _prepare(Path(folder))

        def trial(rule: BalanceRule, rate: float, seed: int) -> Trial:
            config = _config(Path(folder), sources, steps, rule, rate, seed)
            return Trial(f"{rule} {rate:g} seed {seed}", config, 2 * steps, ROUTER_OFFSET)

        rules: tuple[BalanceRule, ...] = ("adamw", "sign")
        tuned = run_trials({(rule, rate): trial(rule, rate, 0) for rule in rules for rate in RATES})
        tuning = {key: steps_until_even(curve, steps) for key, curve in tuned.items()}
        rates: dict[BalanceRule, float] = {
            rule: min(RATES, key=lambda rate: sum(each or steps + 1 for each in tuning[rule, rate])) for rule in rules
        }
        rates["none"] = min(RATES)
        curves = run_trials({(rule, seed): trial(rule, rate, seed) for rule, rate in rates.items() for seed in SEEDS})
    keys = ("rule", "rate", "start", "switch")
    result["rates"] = [dict(zip(keys, (*key, *until), strict=True)) for key, until in tuning.items()]
    result["results"] = {}
    for rule, rate in rates.items():
        until = zip(*(steps_until_even(curves[rule, seed], steps) for seed in SEEDS), strict=True)
        counts = dict(zip(("start", "switch"), until, strict=True))
        start, switch = ("never" if (median := median_or_never(each)) is None else median for each in counts.values())
        print(f"{rule}: steps until the load is even: {start}; after the data changes: {switch} (medians over seeds)")
        result["results"][rule] = {
            "rate": rate if rule != "none" else None,
            "interior": min(RATES) < rate < max(RATES),  # whether the best rate is not at the edge of the grid
            **counts,
            "heldout_loss": [round(curves[rule, seed].final, 4) for seed in SEEDS],
        }
    if parsed.png:
        lines = {f"{rule} seed {s}": (range(1, 2 * steps + 1), curve.entropy) for (rule, s), curve in curves.items()}
        title = "Expert load from a skewed router, by rule (mean and range over seeds)"
        axes = {"x": "step", "y": "expert-load entropy (1 = uniform)"}
        draw_lines(Path(parsed.png), lines, title=title, **axes, marks={steps: "other data"})
    return result


def steps_until_even(curve: Curve, switch: int) -> tuple[int | None, int | None]:
    """Count the steps until the load is even, from the start and from the change of data after `switch` steps."""
    return even_after(curve.entropy[:switch]), even_after(curve.entropy[switch:])


def even_after(entropy: Sequence[float]) -> int | None:
    """Return the first of the `_HELD` steps in a row with an even load, from 1; None if there are none."""
    starts = range(len(entropy) - _HELD + 1)
    return next((step + 1 for step in starts if min(entropy[step : step + _HELD]) >= EVEN), None)


def _prepare(folder: Path) -> dict[str, Path]:
    """Prepare two dissimilar sources from the standard library, with one tokenizer."""
    from zaya_jax.data.prepare.preparation import PrepareSettings, prepare
    from zaya_jax.data.tokenizer import train_tokenizer

    root = Path(sysconfig.get_path("stdlib"))
    files = {"code": sorted(root.glob("*.py")), "tables": sorted(root.glob("encodings/[ckm]*.py"))}
    texts = [path.read_text(encoding="utf-8", errors="replace") for paths in files.values() for path in paths]
    train_tokenizer(texts, 2048).save(folder / "tokenizer.json")
    settings = PrepareSettings("tokens", "text", (".py",), None, 0.1)
    for name, paths in files.items():
        prepare([str(path) for path in paths], folder / "tokenizer.json", folder / name, settings, workers=1)
    return {name: folder / name for name in files}


def _config(folder: Path, sources: dict[str, Path], steps: int, rule: BalanceRule, rate: float, seed: int) -> Config:
    base = to_dict(small_config(folder, steps, seed, _BATCH))
    phase = {"name": "code", "tokens": steps * _BATCH, "mixture": {"code": 1.0}}
    schedule = {"shape": "constant", "warmup_tokens": 10 * _BATCH}
    changes = {
        "phases": [phase | {"schedule": schedule}, phase | {"name": "tables", "mixture": {"tables": 1.0}}],
        "data": {
            "context": base["data"]["context"],
            "cache_dir": str(folder),
            "sources": {name: {"path": str(path)} for name, path in sources.items()},
        },
        "optimizer": {
            "muon": {"learning_rate": 0.005, "newton_schulz_dtype": "float32"},
            "adamw": {"learning_rate": 0.006},
            "roles": {"router": {"learning_rate": _ROUTER}},
            "balance": {"rule": rule, "learning_rate": rate},
        },
    }
    return from_dict(base | changes)


STEPS = "number of training steps before the data changes, and again after it, at least 20"
main = command(run, {"--steps": flag(100, "N", STEPS)}, png="expert-load entropy against steps")
