"""Read a run on disk with `open_run(path)`, without jax."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from zaya_jax.config import Config, current_key, from_dict
from zaya_jax.errors import InputError
from zaya_jax.run.checkpoints import CHECKPOINTS, Checkpoint, list_checkpoints, phase_ends, quarantined
from zaya_jax.run.files import expanded, read_file, require_existing
from zaya_jax.run.folder import CHANGES, CONFIG, METRICS, TIMINGS, read_config
from zaya_jax.run.metrics import read_rows
from zaya_jax.run.status import Status, read_status
from zaya_jax.run.tokenizer import TOKENIZER_FOLDER


@dataclasses.dataclass(frozen=True)
class Run:
    """A run folder. Each property reads its file on every access, so it is current while the run trains."""

    folder: Path

    @property
    def config(self) -> Config:
        """The resolved configuration; InputError if it is missing or this version cannot read it."""
        return from_dict(read_config(self.folder))

    @property
    def changes(self) -> list[dict[str, Any]]:
        """Settings that changed when the run resumed: dicts of `step` and `changes` (key → [old, new])."""
        path = self.folder / CHANGES
        try:
            rows = [json.loads(line) for line in read_file(path).splitlines()] if path.exists() else []
            for row in rows:
                row["changes"] = {current_key(key): values for key, values in row["changes"].items()}
            return rows
        except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            raise InputError(f"{path} cannot be read: {str(error)[:200]}.") from error

    @property
    def phases(self) -> dict[str, int]:
        """The last step of each finished phase by name; InputError if `phases.json` is damaged."""
        return phase_ends(self.folder)

    @property
    def status(self) -> Status | None:
        """The status of the last process that trained the run; None if it is unknown."""
        return read_status(self.folder)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl`, up to the first damaged one; OSError if it cannot be read."""
        return read_rows(self.folder / METRICS)

    @property
    def timings(self) -> list[dict[str, Any]]:
        """The rows of `timings.jsonl`, up to the first damaged one; OSError if it cannot be read."""
        return read_rows(self.folder / TIMINGS)

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints by step, including damaged and superseded ones; arrays are not read."""
        return list_checkpoints(self.folder / CHECKPOINTS)

    @property
    def quarantined(self) -> list[Path]:
        """The folders of quarantined checkpoints."""
        return quarantined(self.folder / CHECKPOINTS)

    @property
    def tokenizer(self) -> Path | None:
        """The folder of the tokenizer and generation files; None if there is none."""
        folder = self.folder / TOKENIZER_FOLDER
        return folder if folder.is_dir() else None


def open_run(path: str | Path) -> Run:
    """Open the run in the folder `path`; `InputError` if that is no run folder."""
    folder = expanded(path)
    require_existing(folder, str(path))
    if not any((folder / name).exists() for name in (CONFIG, CHECKPOINTS)):
        found = {file.parent.name for name in (CONFIG, CHECKPOINTS) for file in folder.glob(f"*/{name}")}
        inside = [str(Path(path) / name) for name in sorted(found)]
        listed = [*inside[:5], *([f"{len(inside) - 5} more"] if len(inside) > 5 else [])]
        advice = f" Name one of the runs inside: {', '.join(listed)}." if inside else ""
        raise InputError(f"{path} is not a run folder: it contains neither {CONFIG} nor {CHECKPOINTS}/.{advice}")
    return Run(folder)
