"""How many tokens each expert gets: evenly, or as a run has measured."""

from pathlib import Path

import numpy as np

from zaya_jax.errors import InputError
from zaya_jax.run.folder import METRICS
from zaya_jax.run.metrics import read_rows


def scale_counts(counts_e: np.ndarray, tokens: int) -> np.ndarray:
    """Scale counts to a sum of `tokens`, by largest remainders; int32 [e]."""
    exact = counts_e / counts_e.sum() * tokens
    sizes = np.floor(exact).astype(np.int32)
    sizes[np.argsort(sizes - exact, kind="stable")[: tokens - int(sizes.sum())]] += 1
    return sizes


def read_histograms(run: str, experts: int, tokens: int) -> dict[str, np.ndarray]:
    """Return the loads of a run's most even and most uneven layer at its last logged step.

    Args:
      run: folder of the run.
      experts: number of experts of a layer.
      tokens: tokens of the micro-batch; those that the run's layer skipped are left out.

    Raises:
      InputError: the folder has no counts, or those of another number of experts.
    """
    rows = [row for row in read_rows(Path(run) / METRICS) if row.get("expert_counts")]
    if not rows:
        raise InputError(f"--routing is {run!r}, but must be the folder of a run with expert_counts in {METRICS}.")
    classes_lc = np.array(rows[-1]["expert_counts"], np.float64)  # the last class is skip
    routed_l, counts_le = classes_lc[:, :-1].sum(1) / np.maximum(classes_lc.sum(1), 1), classes_lc[:, :-1]
    if counts_le.shape[1] != experts:
        raise InputError(f"--routing {run} has {counts_le.shape[1]} experts, but the configuration has {experts}.")
    used = [int(index) for index in np.flatnonzero(routed_l)]
    spread = {index: counts_le[index].max() / counts_le[index].mean() for index in used}
    chosen = {min(used, key=spread.__getitem__), max(used, key=spread.__getitem__)} if used else set()
    return {f"layer {index} at step {rows[-1]['step']}": scale_counts(counts_le[index], round(tokens * routed_l[index]))
            for index in sorted(chosen)}  # fmt: skip
