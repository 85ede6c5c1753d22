"""Configurations that the package ships: `configs/tiny.yaml` and its neighbors are found in every folder."""

import os
from pathlib import Path

from zaya_jax.config.checks import require_path
from zaya_jax.errors import InputError, did_you_mean
from zaya_jax.run.files import nearest_path

FOLDER = "configs"
_SHIPPED = Path(__file__).parents[1] / FOLDER  # in the repository a link to the top-level folder, in a wheel the files


def shipped(name: str) -> Path:
    """Return the path of a shipped file, such as `tiny.yaml` or `evals/base.yaml`."""
    return _SHIPPED / name


def shipped_names(kind: str = ".") -> list[str]:
    """Return names such as `configs/tiny.yaml`, of the sub-folder `kind`: `evals`, "." (of runs) or "**" (all)."""
    return sorted(f"{FOLDER}/{file.relative_to(_SHIPPED)}" for file in _SHIPPED.glob(f"{kind}/*.yaml"))


def find(name: str | Path, folder: Path = Path()) -> Path:
    """Find a configuration by the path that a user wrote, relative to `folder`, or else among the shipped files.

    `InputError` if there is none.
    """
    require_path("The configuration", str(name))
    path, names = folder / os.path.expanduser(name), shipped_names("**")
    if os.path.exists(path):  # unlike Path.exists, never raises
        return path
    if str(Path(name)) in names:
        return shipped(str(Path(name).relative_to(FOLDER)))
    alike = [each for each in names if Path(each).parent == Path(name).parent] or shipped_names()
    hint, same_name = nearest_path(path) or did_you_mean(str(name), names), f"{FOLDER}/{path.name}"
    if same_name in names and not hint.endswith(f"/{path.name}?"):
        hint = f" Did you mean {same_name}?"
    raise InputError(f"The configuration {path} does not exist.{hint} zaya_jax ships {', '.join(alike)}.")
