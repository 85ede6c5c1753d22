"""Compare Muon for matrices with AdamW for everything: steps to the same held-out loss, at their best rates."""

import argparse
import itertools
import math
import tempfile
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from benchmarks.benchmark_command import command, flag
from benchmarks.training_sweep import SEEDS, Curve, Trial, median_or_never, run_trials, small_config, start_result
from zaya_jax.config import AdamWConfig, BalanceConfig, MuonConfig, OptimizerConfig, RoleConfig, RolesConfig
from zaya_jax.errors import InputError
from zaya_jax.lab.result_plots import draw_lines
from zaya_jax.run.files import expanded, read_object, require_existing

Kind = Literal["muon", "adamw"]
Rates = tuple[float, float]  # learning rates of the matrices, and of all other parameters

# The grid of learning rates: of the matrices with each optimizer, and of all other parameters.
MATRICES: dict[Kind, tuple[float, ...]] = {"muon": (0.005, 0.01, 0.02, 0.04), "adamw": (0.0005, 0.001, 0.002, 0.004)}
OTHERS = (0.006, 0.018, 0.054)


def optimizer_config(kind: Kind, matrices: float, others: float) -> OptimizerConfig:
    """Make the configuration of one optimizer: `kind` for matrices, AdamW for the rest, each with its learning rate."""
    role = RoleConfig(learning_rate=matrices / others)
    roles = RolesConfig(attention=role, router=role, expert=role) if kind == "adamw" else RolesConfig()
    muon, adamw = MuonConfig(learning_rate=matrices, newton_schulz_dtype="float32"), AdamWConfig(learning_rate=others)
    return OptimizerConfig(kind, muon, adamw, roles, BalanceConfig(learning_rate=0.02))


def run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Count the steps that Muon needs to reach AdamW's final held-out loss.

    Trains models of 1.65M parameters with three seeds, one training per core. The learning rates of both are tuned on a
    grid first.

    optimizer --steps 100 --png optimizer.png
    """
    steps: int = parsed.steps
    size = f"{steps} steps of 2,048 tokens of the text corpus, rates constant after 10 steps"
    result = start_result("steps to the final held-out loss of AdamW", size, "AdamW for all parameters", steps)
    kinds: tuple[Kind, ...] = get_args(Kind)
    grid = None if parsed.tuned is None else read_grid(parsed.tuned)
    with tempfile.TemporaryDirectory() as folder:

        def trial(kind: Kind, rates: Rates, seed: int, evaluation_interval: int) -> Trial:
            config = small_config(Path(folder), steps, seed, optimizer=optimizer_config(kind, *rates))
            return Trial(f"{kind} {rates[0]:g} {rates[1]:g} seed {seed}", config, evaluation_interval)

        if grid is None:
            tried = {kind: list(itertools.product(MATRICES[kind], OTHERS)) for kind in kinds}
            curves = run_trials({(kind, pair): trial(kind, pair, 0, steps) for kind in kinds for pair in tried[kind]})
            grid = {kind: make_grid({pair: curves[kind, pair].final for pair in tried[kind]}) for kind in kinds}
        best = {kind: (grid[kind]["best"]["matrices"], grid[kind]["best"]["others"]) for kind in kinds}
        curves = run_trials({(seed, kind): trial(kind, best[kind], seed, 5) for seed in SEEDS for kind in kinds})
    named = {f"{kind} seed {seed}": curve for (seed, kind), curve in curves.items()}
    result |= {"tuned": parsed.tuned, "grid": grid, "curves": {name: curve.heldout for name, curve in named.items()}}
    result["results"] = compare({seed: {kind: curves[seed, kind] for kind in kinds} for seed in SEEDS})
    for kind, row in grid.items():
        if not row["interior"]:
            print(f"The best learning rates of {kind} are at the edge of the grid: widen the grid.")
    share, target = result["results"]["median"], "AdamW's final held-out loss"
    if share is None:
        print(f"Muon did not reach {target}.")
    else:
        print(f"Muon reaches {target} in {share:.0%} of its steps (median of {len(SEEDS)} seeds).")
    if parsed.png:
        lines = {name: tuple(zip(*curve.heldout, strict=True)) for name, curve in named.items()}
        title = "Optimizers at their best learning rates (mean and range over seeds)"
        draw_lines(Path(parsed.png), lines, title=title, x="step", y="held-out loss (nats/token)")
    return result


def make_grid(losses: dict[Rates, float]) -> dict[str, Any]:
    """Describe a grid of learning rates: the losses, the best rates, and whether these are inside, not at the edge."""
    best, axes = min(losses, key=losses.__getitem__), zip(*losses, strict=True)
    return {
        "rates": [{"matrices": m, "others": o, "heldout_loss": round(loss, 4)} for (m, o), loss in losses.items()],
        "best": {"matrices": best[0], "others": best[1]},
        "interior": all(min(axis) < rate < max(axis) for rate, axis in zip(best, axes, strict=True)),
    }


def read_grid(tuned: str) -> dict[str, Any]:
    """Read the grids of an earlier result; InputError if the file `tuned` has none."""
    path = expanded(tuned)
    require_existing(path, f"--tuned is {tuned!r}, which")
    grid: Any = read_object(path).get("grid")
    try:
        rates = [grid[kind]["best"][role] for kind in get_args(Kind) for role in ("matrices", "others")]
    except (TypeError, KeyError):
        rates = [None]
    if not all(isinstance(rate, float) and 0 < rate < math.inf for rate in rates):
        raise InputError(f"--tuned is {tuned!r}, but must be a result of python -m benchmarks optimizer.")
    return grid


def compare(curves: dict[int, dict[Kind, Curve]]) -> dict[str, Any]:
    """Count the steps of both to AdamW's final loss, and their ratio, for each seed; and the median ratio.

    A seed with which Muon never reaches that loss counts as infinite.
    """
    rows = []
    for seed, both in curves.items():
        target = both["adamw"].final
        muon, adamw = (steps_to(both[kind], target) for kind in ("muon", "adamw"))
        ratio = None if muon is None or adamw is None else round(muon / adamw, 3)
        rows.append({"seed": seed, "heldout_loss": round(target, 4), "muon": muon, "adamw": adamw, "ratio": ratio})
    return {"seeds": rows, "median": median_or_never([row["ratio"] for row in rows])}


def steps_to(curve: Curve, target: float) -> float | None:
    """Return the steps until the held-out loss reaches `target`, interpolated linearly; None if it never does."""
    before: tuple[float, float] | None = None
    for step, loss in curve.heldout:
        if loss <= target:
            return step if before is None else float(np.interp(-target, (-before[1], -loss), (before[0], step)))
        before = (step, loss)
    return None


TUNED = "use the best learning rates of an earlier --output, such as benchmarks/optimizer_cpu.json, without tuning"
FLAGS = {
    "--steps": flag(150, "N", "number of training steps, at least 20"),
    "--tuned": {"metavar": "FILE", "help": TUNED},
}
main = command(run, FLAGS, png="held-out loss against steps")
