"""Tables of settings: what differs between runs, and from the run or file that a run started from."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zaya_jax.aegis.report.run_data import RunData, flatten_settings
from zaya_jax.config import load_config, to_dict
from zaya_jax.config.checks import shown
from zaya_jax.config.weight_source import HF
from zaya_jax.errors import InputError
from zaya_jax.run.checkpoints import CHECKPOINTS
from zaya_jax.run.folder import CONFIG, read_config
from zaya_jax.run.table import NONE, Table

_LINEAGE = ("resume_from", "init_from")


def between_runs(runs: Sequence[RunData]) -> Table:
    """List the settings in which runs differ."""
    return differences("Settings that differ between the runs", _by_name(runs))


def from_parents(run: RunData) -> Iterator[Table]:
    """List the settings in which a run differs from those whose weights it started from."""
    for key in _LINEAGE:
        source = run.config.get(key)
        if not isinstance(source, str):
            continue
        title, why = f"Differences from {key}={source}", f"{source} has no {CONFIG}, so its settings are unknown."
        try:
            if (parent := _run_folder(source)) is not None:
                settings = {source: flatten_settings(read_config(parent)), run.name: flatten_settings(run.config)}
                yield differences(title, settings)
                continue
        except InputError as error:
            why = str(error)
        why = "A transformers folder has no training settings." if source.startswith(HF) else why
        yield Table(title, [], [], (why,))


def from_file(runs: Sequence[RunData], path: str) -> Table:
    """List the settings in which runs differ from a configuration file; InputError if it is invalid."""
    settings = flatten_settings(to_dict(load_config(path)))
    return differences(f"Differences from {path}", {path: settings} | _by_name(runs))


def changes(run: RunData) -> Table:
    """List the settings that changed when a run resumed."""
    rows = list[list[str]]()
    for change in run.changes:
        rows += [[f"{change['step']:,}", key, shown(old), shown(new)] for key, (old, new) in change["changes"].items()]
    return Table("Settings that changed on resuming", ["after step", "key", "old", "new"], rows)


def differences(title: str, settings: Mapping[str, Mapping[str, Any]]) -> Table:
    """Make a table of the keys whose values differ."""
    keys = dict.fromkeys(key for each in settings.values() for key in each)
    texts = {key: [shown(each[key]) if key in each else NONE for each in settings.values()] for key in keys}
    rows = [[key, *values] for key, values in texts.items() if len(set(values)) > 1]
    return Table(title, ["key", *settings], rows, () if rows else ("No settings differ.",))


def _by_name(runs: Sequence[RunData]) -> dict[str, dict[str, Any]]:
    return {run.name: flatten_settings(run.config) for run in runs}


def _run_folder(source: str) -> Path | None:
    """Return the run folder in RUN_DIR, RUN_DIR@PHASE or RUN_DIR/checkpoints/STEP; None if it is not there."""
    for text in (source, source.rpartition("@")[0]):
        folder = Path(os.path.expanduser(text))
        folder = folder.parent.parent if folder.parent.name == CHECKPOINTS else folder
        if text and os.path.exists(folder / CONFIG):  # unlike Path.exists, never raises
            return folder
    return None
