"""What `python -m zaya_jax.checkpoint` says of checkpoints: ls, verify, inspect, diff."""

from collections.abc import Iterator
from pathlib import Path

from zaya_jax.checkpoint.inspection import compare_checkpoints, configurations, inspect_checkpoint, open_checkpoint
from zaya_jax.checkpoint.reader import verify_checkpoint
from zaya_jax.errors import InputError
from zaya_jax.run.checkpoints import FOLDER, PINNED, checkpoint_folder, counts, named_steps
from zaya_jax.run.manifest import Damaged, read_manifest


def checkpoints_of(run: Path) -> Path:
    """The folder of a run's checkpoints; InputError where it has none."""
    folder = run.expanduser() / FOLDER
    if not folder.is_dir():
        raise InputError(f"{run} is no run folder: it has no {FOLDER}/.")
    return folder


def list_run(run: Path) -> str:
    """A line for each checkpoint of a run, and for each that was set aside."""
    folder = checkpoints_of(run)
    lines = [f"{'step':>9}  {'phase':<14}{'tokens':>16}  {'held-out':>9}  {'size':>10}  notes"]
    for step in named_steps(folder):
        path = folder / str(step)
        try:
            manifest = read_manifest(path)
        except Damaged as error:
            lines.append(f"{step:>9}  damaged: {error}")
            continue
        notes = [note for note, holds in (
            ("pinned", (path / PINNED).exists()),
            ("read back", manifest.read_back),
            ("no digests", not manifest.digests),
            ("stale: it does not count", not counts(folder, step, manifest.generation)),
        ) if holds]  # fmt: skip
        about, loss = manifest.about, manifest.about.get("heldout_loss")
        lines.append(
            f"{step:>9}  {about.get('phase', '-'):<14}{about.get('tokens_seen', 0):>16,}  "
            f"{'-' if loss is None else f'{loss:.4f}':>9}  {size_text(sum(manifest.files.values())):>10}  "
            f"{', '.join(notes)}".rstrip()
        )
    lines += [f"set aside: {path.name}" for path in quarantine(folder)]
    return "\n".join(lines)


def quarantine(folder: Path) -> list[Path]:
    """What was saved and does not count: damaged, or of processes given up for dead."""
    return sorted(path for kind in ("corrupt", "stale") for path in folder.glob(f"*.{kind}-*"))


def verify(path: str, every: bool) -> tuple[str, bool]:
    """What is wrong with a checkpoint, or with all of a run, and whether nothing is."""
    if every:
        folder = checkpoints_of(Path(path))
        folders = [folder / str(step) for step in named_steps(folder)]
    else:
        folders = [checkpoint_folder(path, "CHECKPOINT")]
    found = {folder: verify_checkpoint(folder) for folder in folders}
    lines = [line for folder, wrong in found.items()
             for line in (wrong or [f"{folder} is what was saved ({_content(folder)})."])]  # fmt: skip
    return "\n".join(lines) or f"{path} has no checkpoint.", not any(found.values())


def _content(folder: Path) -> str:
    manifest = read_manifest(folder)
    unknown = "" if manifest.digests else "; it has no digests, so that its files' sizes alone were compared"
    return f"{len(manifest.leaves)} arrays, {size_text(sum(manifest.files.values()))}{unknown}"


def inspect(path: str) -> Iterator[str]:
    """What a checkpoint says of itself, then a line for each array."""
    folder = checkpoint_folder(path, "CHECKPOINT")
    manifest, _ = open_checkpoint(folder)
    about = manifest.about
    yield f"{folder}: step {manifest.step}, phase {about.get('phase', '-')}, {about.get('tokens_seen', 0):,} tokens"
    for key in ("environment", "versions"):
        yield f"{key}: {', '.join(f'{name} {value}' for name, value in about.get(key, {}).items())}"
    width = 2 + max(map(len, manifest.leaves), default=0)
    yield f"{'array':<{width}}{'dtype':<10}{'shape':<24}{'norm':>13}{'largest':>13}"
    for leaf in inspect_checkpoint(folder):
        shape = "×".join(map(str, leaf.shape)) or "scalar"
        odd = "" if leaf.finite else "  not finite"
        yield f"{leaf.name:<{width}}{leaf.dtype:<10}{shape:<24}{leaf.norm:>13.6g}{leaf.largest:>13.6g}{odd}"


def diff(first: str, second: str) -> Iterator[str]:
    """A line for each array and each key of the configuration in which two checkpoints differ."""
    one, other = (checkpoint_folder(path, "CHECKPOINT") for path in (first, second))
    for key, here, there in configurations(open_checkpoint(one)[0], open_checkpoint(other)[0]):
        yield f"{key}: {here!r} and {there!r}"
    for found in compare_checkpoints(one, other):
        yield f"{found.name}: " + (
            found.note or f"largest difference {found.largest:.6g}, {found.relative:.3g} of the first's norm"
        )


def size_text(size: int) -> str:
    """Bytes as a person reads them."""
    value, unit = float(size), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
