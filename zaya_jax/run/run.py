"""A run on disk, read without jax: `open_run(path)`."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from zaya_jax.config import Config, current_key, from_dict
from zaya_jax.errors import InputError
from zaya_jax.run.checkpoints import CHECKPOINTS, Checkpoint, list_checkpoints, phase_ends, quarantined
from zaya_jax.run.folder import CHANGES, CONFIG, METRICS, TIMINGS, read_config
from zaya_jax.run.metrics import read_rows
from zaya_jax.run.status import Status, read_status
from zaya_jax.run.tokenizer import TOKENIZER_FOLDER


@dataclasses.dataclass(frozen=True)
class Run:
    """A run folder; each property reads its files anew, so that what is seen of a run in training is never stale."""

    folder: Path

    @property
    def config(self) -> Config:
        """The resolved configuration of the run; InputError where it has none, or another version wrote it."""
        return from_dict(read_config(self.folder))

    @property
    def changes(self) -> list[dict[str, Any]]:
        """Settings that changed when the run resumed: dicts of `step` and `changes` (key → [old, new]).

        The keys are those of this version, whatever version wrote them.
        """
        path = self.folder / CHANGES
        try:
            rows = [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
            return [row | {"changes": {current_key(key): values for key, values in row["changes"].items()}}
                    for row in rows]  # fmt: skip
        except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            raise InputError(f"{path} cannot be read: {str(error)[:200]}.") from error

    @property
    def phases(self) -> dict[str, int]:
        """The last step of each phase that is done, by name; InputError where `phases.json` is damaged."""
        return phase_ends(self.folder)

    @property
    def status(self) -> Status | None:
        """What became of the last process that trained the run; None where that is not known."""
        return read_status(self.folder)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl`, up to the first that is damaged."""
        return read_rows(self.folder / METRICS)

    @property
    def timings(self) -> list[dict[str, Any]]:
        """The rows of `timings.jsonl`, up to the first that is damaged."""
        return read_rows(self.folder / TIMINGS)

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints in order of steps, also those that are damaged or superseded; arrays are not read."""
        return list_checkpoints(self.folder / CHECKPOINTS)

    @property
    def quarantined(self) -> list[Path]:
        """The folders of checkpoints that were found damaged or superseded and are kept under another name."""
        return quarantined(self.folder / CHECKPOINTS)

    @property
    def tokenizer(self) -> Path | None:
        """The folder of the tokenizer and generation files; None where there is none."""
        folder = self.folder / TOKENIZER_FOLDER
        return folder if folder.is_dir() else None


def open_run(path: str | Path) -> Run:
    """The run in the folder `path`.

    Raises:
      InputError: it holds no run.
    """
    folder = Path(path).expanduser()
    if not any((folder / name).exists() for name in (CONFIG, CHECKPOINTS)):
        raise InputError(f"{path} is no run folder: it has neither {CONFIG} nor {CHECKPOINTS}/.")
    return Run(folder)
