"""Output of `python -m zaya_jax.checkpoint` verify, inspect and diff."""

from collections.abc import Iterator

from zaya_jax.checkpoint.inspection import compare_checkpoints, configurations, inspect_checkpoint, open_checkpoint
from zaya_jax.checkpoint.reader import verify_checkpoint
from zaya_jax.config.checks import shown
from zaya_jax.run.checkpoints import CHECKPOINTS, checkpoint_folder, list_checkpoints
from zaya_jax.run.files import expanded
from zaya_jax.run.manifest import Unreadable, read_manifest
from zaya_jax.run.run import open_run
from zaya_jax.run.table import size_text


def verify(path: str, every: bool) -> tuple[list[str], bool]:
    """Verify a checkpoint, or every checkpoint of a run; return a report of lines and whether all are intact."""
    of_run = expanded(path) / CHECKPOINTS
    if every:
        folders = [open_run(path).folder / CHECKPOINTS / str(each.step) for each in open_run(path).checkpoints]
    elif listed := [each for each in list_checkpoints(of_run, check_files=False) if not each.is_superseded]:
        folders = [of_run / str(listed[-1].step)]  # also if it is damaged, so that others would be used
    else:
        folders = [checkpoint_folder(path, "CHECKPOINT")]
    lines, intact = [], True
    for folder in folders:
        try:
            damage = verify_checkpoint(folder)
        except Unreadable as error:
            damage = [str(error)]
        if damage:
            lines, intact = lines + damage, False
            continue
        manifest = read_manifest(folder)
        checked = "all checksums match" if manifest.digests else "file sizes match (saved without checksums)"
        lines.append(f"{folder}: OK, {checked} ({len(manifest.leaves)} arrays, "
                     f"{size_text(sum(manifest.files.values()))})")  # fmt: skip
    return lines or [f"{path} has no checkpoint."], intact


def inspect(path: str) -> Iterator[str]:
    """Yield lines with a checkpoint's metadata, then one line per array."""
    folder = checkpoint_folder(path, "CHECKPOINT")
    manifest, _ = open_checkpoint(folder)
    metadata = manifest.metadata
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
    """Yield one line per configuration key and per array that differ between two checkpoints."""
    folders = [checkpoint_folder(path, "CHECKPOINT") for path in (first, second)]
    for key, first_value, second_value in configurations(*(open_checkpoint(folder)[0] for folder in folders)):
        yield f"{key}: {shown(first_value)} vs {shown(second_value)}"
    for distance in compare_checkpoints(*folders):
        yield f"{distance.name}: " + (
            distance.note or f"max abs diff {distance.largest:.6g}, relative norm {distance.relative:.3g}"
        )
