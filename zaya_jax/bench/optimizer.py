"""Muon for the matrices against AdamW for everything: steps to the same held-out loss, both at their best rates."""

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from zaya_jax.bench.plot import draw_lines
from zaya_jax.bench.sweep import Curve, Trial, run_trials, small_config
from zaya_jax.config import AdamWConfig, BalanceConfig, MuonConfig, OptimizerConfig, RoleConfig, RolesConfig
from zaya_jax.machine.result import check_request, describe_run, write_result

Kind = Literal["muon", "adamw"]
Rates = tuple[float, float]  # of the matrices, of the rest
_SEEDS = (0, 1, 2)


class Grid(NamedTuple):
    """Learning rates tried: of the matrices, for each kind, and of everything else."""

    matrices: dict[Kind, tuple[float, ...]]
    others: tuple[float, ...]


GRID = Grid(
    {"muon": (0.005, 0.01, 0.02, 0.04), "adamw": (0.0005, 0.001, 0.002, 0.004)},
    (0.006, 0.018, 0.054),
)


def optimizer_config(kind: Kind, matrices: float, others: float) -> OptimizerConfig:
    """Matrices by `kind` at one rate, the rest by AdamW at another."""
    role = RoleConfig(learning_rate=matrices / others)
    roles = RolesConfig(attention=role, router=role, expert=role) if kind == "adamw" else RolesConfig()
    return OptimizerConfig(kind, MuonConfig(learning_rate=matrices, iterates="float32"),
                           AdamWConfig(learning_rate=others), roles, BalanceConfig(learning_rate=0.02))  # fmt: skip


def bench_optimizer(steps: int, output: str | None, png: str | None, grid: Grid = GRID) -> dict[str, Any]:
    """Tune both on one seed with the same number of trials, then compare them on three.

    Args:
      steps: of each training.
      output: a JSON file.
      png: a picture of the curves.
      grid: rates tried.
    """
    check_request(steps, output)
    result = describe_run(
        "steps to the held-out loss that AdamW alone reaches at its end",
        f"1.65M parameters, {steps} steps of 2,048 tokens of the embedded corpus, rates constant after 10 steps",
        "AdamW for all parameters", ("zaya-jax", "jax", "jaxlib", "optax"),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)

        def trial(kind: Kind, rates: Rates, seed: int, every: int) -> Trial:
            config = small_config(cache, steps, seed, optimizer=optimizer_config(kind, *rates))
            return Trial(f"{kind} {rates[0]:g} {rates[1]:g} seed {seed}", config, every)

        kinds: tuple[Kind, ...] = get_args(Kind)
        points: dict[Kind, list[Rates]] = {
            kind: list(itertools.product(grid.matrices[kind], grid.others)) for kind in kinds
        }
        trials = [trial(kind, rates, 0, steps) for kind, all_rates in points.items() for rates in all_rates]
        losses = iter(curve.final for curve in run_trials(trials, _say))
        found: dict[Kind, dict[Rates, float]] = {
            kind: {rates: next(losses) for rates in points[kind]} for kind in kinds
        }
        best: dict[Kind, Rates] = {kind: min(found[kind], key=found[kind].__getitem__) for kind in kinds}
        confirm = [trial(kind, best[kind], seed, 5) for seed in _SEEDS for kind in kinds]
        curves = dict(zip(((seed, kind) for seed in _SEEDS for kind in kinds), run_trials(confirm, _say), strict=True))
    result["grid"] = {
        kind: {
            "rates": [{"matrices": m, "others": o, "heldout_loss": round(loss, 4)} for (m, o), loss in tried.items()],
            "best": {"matrices": best[kind][0], "others": best[kind][1]},
            "interior": _interior(best[kind], grid.matrices[kind], grid.others),
        }
        for kind, tried in found.items()
    }
    result["curves"] = {f"{kind} seed {seed}": curve.heldout for (seed, kind), curve in curves.items()}
    result["results"] = compare({seed: {kind: curves[seed, kind] for kind in kinds} for seed in _SEEDS})
    for kind, row in result["grid"].items():
        if not row["interior"]:
            print(f"The best rates of {kind} lie at the edge of the grid: widen it.")
    print(f"Muon needs {result['results']['median']} of AdamW's steps (median of {len(_SEEDS)} seeds)")
    if png:
        draw_lines(Path(png), {name: tuple(zip(*points, strict=True)) for name, points in result["curves"].items()},
                   x="step", y="held-out loss (nats/token)")  # fmt: skip
    write_result(result, output)
    return result


def compare(curves: dict[int, dict[Kind, Curve]]) -> dict[str, Any]:
    """Steps of both to the loss that AdamW has at its end, and their ratio: of each seed, and the median.

    A seed on which Muon never comes to that loss counts as more than any number.
    """
    rows = []
    for seed, both in curves.items():
        target = both["adamw"].final
        muon, adamw = (steps_to(both[kind], target) for kind in ("muon", "adamw"))
        ratio = muon / adamw if muon is not None and adamw is not None else None
        rows.append({"seed": seed, "heldout_loss": round(target, 4), "muon": muon, "adamw": adamw,
                     "ratio": None if ratio is None else round(ratio, 3)})  # fmt: skip
    ratios = sorted((row["ratio"] for row in rows), key=lambda ratio: (ratio is None, ratio))
    return {"seeds": rows, "median": ratios[len(ratios) // 2]}


def steps_to(curve: Curve, target: float) -> float | None:
    """Steps until the held-out loss is down at `target`, between two looks by the line through them."""
    before: tuple[float, float] | None = None
    for step, loss in curve.heldout:
        if loss <= target:
            if before is None:
                return step
            return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - loss)
        before = (step, loss)
    return None


def _interior(best: Rates, *axes: tuple[float, ...]) -> bool:
    return all(min(axis) < value < max(axis) for value, axis in zip(best, axes, strict=True))


_say: Callable[[str], None] = print
