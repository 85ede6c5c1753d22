"""Output of `python -m zaya_jax.checkpoint ls`, without jax."""

from pathlib import Path

from zaya_jax.run.checkpoints import Checkpoint
from zaya_jax.run.run import open_run
from zaya_jax.run.table import size_text


def list_run(path: Path) -> list[str]:
    """Return one line per checkpoint and per quarantined checkpoint of a run, and its status."""
    run = open_run(path)
    lines = [f"{'step':>9}  {'phase':<14}{'tokens':>16}  {'held-out':>9}  {'size':>10}  notes"]
    lines += [*map(_line, run.checkpoints), *(f"quarantined: {folder.name}" for folder in run.quarantined)]
    if (status := run.status) is not None:
        end = "" if status.exit_status is None else f" with exit status {status.exit_status}"
        message = f": {status.message}" if status.message else ""
        lines.append(f"{status.state}{end} (process {status.pid} on {status.host}, {status.time}){message}")
    return lines


def _line(checkpoint: Checkpoint) -> str:
    if checkpoint.manifest is None:
        return f"{checkpoint.step:>9}  {checkpoint.problem}"
    kinds = {
        "pinned": checkpoint.is_pinned,
        "verified": checkpoint.is_verified,
        "no checksums": not checkpoint.manifest.digests,
        "superseded: never restored": checkpoint.is_superseded,
    }
    notes = ", ".join(note for note, holds in kinds.items() if holds)
    loss = "-" if checkpoint.heldout_loss is None else f"{checkpoint.heldout_loss:.4f}"
    numbers = f"{checkpoint.step:>9}  {checkpoint.phase:<14}{checkpoint.tokens:>16,}  {loss:>9}"
    return f"{numbers}  {size_text(checkpoint.size):>10}  {notes}".rstrip()
