"""Metrics for Weights & Biases; `WANDB_MODE=offline` keeps them in the run folder for `wandb sync`."""

import contextlib
import importlib
import os
import secrets
from pathlib import Path
from typing import Any

from zaya_jax.config import Config, to_dict
from zaya_jax.errors import InputError
from zaya_jax.run.files import write_atomically
from zaya_jax.run.metrics import MetricSink
from zaya_jax.run.writing import make_folder
from zaya_jax.train.sinks.mirror import scalars

wandb: Any = importlib.import_module("wandb")  # an extra, which is not installed where types are checked

_SECONDS = 15  # training waits for the server this long at its start, and for the upload of the last rows at its end


def require_login() -> None:
    """Raise `InputError` without a login that W&B needs: on a terminal, `wandb.init` would wait for the keyboard."""
    if wandb.run is not None or wandb.setup().settings.mode in ("offline", "dryrun", "disabled"):
        return
    with contextlib.suppress(wandb.Error):  # a key that cannot be one
        if wandb.login(prompt=False, verify=False):
            return
    advice = "Run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline to keep its files in the run folder."
    raise InputError(f"train.sinks has wandb, but W&B has no valid API key. {advice}")


class WandbSink(MetricSink):
    """Logs a row per step to one W&B run, which a resumed training continues; another process writes the rows."""

    def __init__(self, folder: Path, config: Config) -> None:
        """Start the W&B run, or continue the one whose id is in `folder`, `wandb/` of the run folder."""
        make_folder(folder)
        id_file = folder / "run_id"
        if not id_file.exists():
            write_atomically(id_file, os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4))
        limits = {"init_timeout": _SECONDS, "finish_timeout": _SECONDS, "finish_timeout_raises": False}
        own = {"id": id_file.read_text(encoding="utf-8"), "name": folder.parent.name, "dir": folder.parent}
        own |= {"project": os.environ.get("WANDB_PROJECT", "zaya_jax"), "config": to_dict(config)}
        self._run = wandb.init(**own, resume="allow", settings=wandb.Settings(console="off", **limits))

    def write(self, metrics: dict[str, Any], timings: dict[str, Any]) -> None:
        """Log the scalars of a step; W&B ignores a step that it has, and keeps rows on disk until it is reached."""
        self._run.log(scalars(metrics) | scalars(timings, "timings/"), step=metrics["step"])

    def close(self) -> None:
        """Upload the last rows."""
        self._run.finish()
