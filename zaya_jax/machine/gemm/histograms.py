"""How many tokens each expert gets: evenly, or as a run has measured."""

from pathlib import Path

import numpy as np

from zaya_jax.errors import InputError
from zaya_jax.run.metrics import read_rows

METRICS = "metrics.jsonl"


def scaled(counts_e: np.ndarray, tokens: int) -> np.ndarray:
    """Scale counts to a sum of `tokens`, by largest remainders; int32 [e]."""
    exact = counts_e / counts_e.sum() * tokens
    sizes = np.floor(exact).astype(np.int32)
    sizes[np.argsort(sizes - exact, kind="stable")[: tokens - int(sizes.sum())]] += 1
    return sizes


def measured(run: str, experts: int, tokens: int) -> dict[str, np.ndarray]:
    """Return the loads of a run's most even and most uneven layer at its last logged step, scaled to `tokens`.

    Raises:
      InputError: the folder has no counts, or those of another number of experts.
    """
    rows = [row for row in read_rows(Path(run) / METRICS) if row.get("expert_counts")]
    if not rows:
        raise InputError(f"--routing is {run!r}, but must be the folder of a run with expert_counts in {METRICS}.")
    counts_le = np.array(rows[-1]["expert_counts"], np.float64)[:, :-1]  # the last class is skip
    if counts_le.shape[1] != experts:
        raise InputError(f"--routing {run} has {counts_le.shape[1]} experts, but the configuration has {experts}.")
    spread = counts_le.max(1) / counts_le.mean(1)
    step = rows[-1]["step"]
    return {f"layer {index} at step {step}": scaled(counts_le[index], tokens)
            for index in sorted({int(spread.argmin()), int(spread.argmax())})}  # fmt: skip
