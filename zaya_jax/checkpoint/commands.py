"""What `python -m zaya_jax.checkpoint` says of checkpoints: ls, verify, inspect, diff."""

from collections.abc import Iterator
from pathlib import Path

from zaya_jax.checkpoint.inspection import compare_checkpoints, configurations, inspect_checkpoint, open_checkpoint
from zaya_jax.checkpoint.reader import verify_checkpoint
from zaya_jax.config.checks import shown
from zaya_jax.run.checkpoints import FOLDER, Checkpoint, checkpoint_folder
from zaya_jax.run.manifest import read_manifest
from zaya_jax.run.run import open_run


def list_run(path: Path) -> str:
    """A line for each checkpoint of a run, each that was quarantined, and the run's status."""
    run = open_run(path)
    lines = [
        f"{'step':>9}  {'phase':<14}{'tokens':>16}  {'held-out':>9}  {'size':>10}  notes",
        *map(_line, run.checkpoints),
    ]
    lines += [f"quarantined: {folder.name}" for folder in run.quarantined]
    if (status := run.status) is not None:
        end = "" if status.exit_status is None else f" with exit status {status.exit_status}"
        message = f": {status.message}" if status.message else ""
        lines.append(f"{status.state}{end} (process {status.pid} on {status.host}, {status.time}){message}")
    return "\n".join(lines)


def _line(checkpoint: Checkpoint) -> str:
    if checkpoint.manifest is None:
        return f"{checkpoint.step:>9}  damaged: {checkpoint.problem}"
    notes = [note for note, holds in (
        ("pinned", checkpoint.is_pinned),
        ("verified", checkpoint.is_verified),
        ("no checksums", not checkpoint.manifest.digests),
        ("superseded: never restored", checkpoint.is_superseded),
    ) if holds]  # fmt: skip
    loss = "-" if checkpoint.heldout_loss is None else f"{checkpoint.heldout_loss:.4f}"
    return (f"{checkpoint.step:>9}  {checkpoint.phase:<14}{checkpoint.tokens:>16,}  {loss:>9}  "
            f"{size_text(checkpoint.size):>10}  {', '.join(notes)}").rstrip()  # fmt: skip


def verify(path: str, every: bool) -> tuple[str, bool]:
    """What is damaged in a checkpoint, or in all of a run, and whether nothing is."""
    if every:
        run = open_run(path)
        folders = [run.folder / FOLDER / str(checkpoint.step) for checkpoint in run.checkpoints]
    else:
        folders = [checkpoint_folder(path, "CHECKPOINT")]
    damage = {folder: verify_checkpoint(folder) for folder in folders}
    lines = [line for folder, sentences in damage.items() for line in (sentences or [f"{folder}: {_content(folder)}"])]
    return "\n".join(lines) or f"{path} has no checkpoint.", not any(damage.values())


def _content(folder: Path) -> str:
    manifest = read_manifest(folder)
    checked = "all checksums match" if manifest.digests else "file sizes match, it has no checksums"
    return f"OK, {checked} ({len(manifest.leaves)} arrays, {size_text(sum(manifest.files.values()))})"


def inspect(path: str) -> Iterator[str]:
    """What a checkpoint says of itself, then a line for each array."""
    folder = checkpoint_folder(path, "CHECKPOINT")
    manifest, _ = open_checkpoint(folder)
    metadata = manifest.about
    yield (f"{folder}: step {manifest.step}, phase {metadata.get('phase', '-')}, "
           f"{metadata.get('tokens_seen', 0):,} tokens")  # fmt: skip
    for key in ("environment", "versions"):
        yield f"{key}: {', '.join(f'{name} {value}' for name, value in metadata.get(key, {}).items())}"
    width = 2 + max(map(len, manifest.leaves), default=0)
    yield f"{'array':<{width}}{'dtype':<10}{'shape':<24}{'norm':>13}{'max abs':>13}"
    for leaf in inspect_checkpoint(folder):
        shape = "×".join(map(str, leaf.shape)) or "scalar"
        odd = "" if leaf.finite else "  not finite"
        yield f"{leaf.name:<{width}}{leaf.dtype:<10}{shape:<24}{leaf.norm:>13.6g}{leaf.largest:>13.6g}{odd}"


def diff(first: str, second: str) -> Iterator[str]:
    """A line for each array and each key of the configuration in which two checkpoints differ."""
    folders = [checkpoint_folder(path, "CHECKPOINT") for path in (first, second)]
    for key, here, there in configurations(*(open_checkpoint(folder)[0] for folder in folders)):
        yield f"{key}: {shown(here)} and {shown(there)}"
    for distance in compare_checkpoints(*folders):
        yield f"{distance.name}: " + (
            distance.note or f"max abs diff {distance.largest:.6g}, relative norm {distance.relative:.3g}"
        )


def size_text(size: int) -> str:
    """Bytes as a person reads them."""
    value, unit = float(size), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
