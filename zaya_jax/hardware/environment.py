"""Apply the environment variables and XLA flags of a preset before jax is imported."""

import contextlib
import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from zaya_jax.hardware.detection import cpu_digest
from zaya_jax.hardware.presets import DETERMINISTIC, PRESETS, TRACED, Preset, Setting
from zaya_jax.run.signals import warn
from zaya_jax.run.writing import private_folder, replaceable_at

APPLIED = "ZAYA_PRESET"  # environment variable with the name of the applied preset


def apply_preset(preset: Preset, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the preset's flags and variables in `environment`, except those that are already set."""
    takes_flags = _takes_flags(environment)
    for setting in preset.settings:
        if _current(setting, environment) is None and not setting.is_flag:
            environment[setting.name] = setting.value
        elif _current(setting, environment) is None and takes_flags:
            environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '').strip()} {setting.text}".strip()
    environment[APPLIED] = preset.name


def keep_compilations(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let jax keep compiled programs, and XLA the results of its autotuning, for later starts on such a machine.

    They are in `~/.cache/zaya_jax`, or below `XDG_CACHE_HOME`, in a folder for this kind of processor. An existing
    `JAX_COMPILATION_CACHE_DIR` is used instead; if it is empty, or the folder cannot be written, nothing is kept.
    """
    home = environment.get("XDG_CACHE_HOME") or (environment.get("HOME") and f"{environment['HOME']}/.cache")
    if not home or "JAX_COMPILATION_CACHE_DIR" in environment:
        return
    folder = Path(home) / "zaya_jax" / f"xla-{cpu_digest()}"
    # Compiled code is run from it, so it must be this user's; the home in a container may be another's.
    with contextlib.suppress(OSError), private_folder(folder, by_name=True) as opened:
        if (open_folder := replaceable_at(folder)) is not None:
            change = f"To keep it: chmod go-w {open_folder}, or set JAX_COMPILATION_CACHE_DIR."
            warn(f"Warning: others can write {open_folder}, so no compiled code is kept in {folder}. {change}")
        elif os.access(opened, os.W_OK | os.X_OK):
            environment["JAX_COMPILATION_CACHE_DIR"] = str(folder)


def combine_thresholds(environment: Mapping[str, str] = os.environ) -> str:
    """Return the flags for the sizes up to which XLA combines messages, on which all processes of a job must agree."""
    flags = re.findall(r"--xla_gpu_\w+_combine_threshold_bytes=\S+", environment.get("XLA_FLAGS", ""))
    return " ".join(sorted(flags))


def step_options(
    *,
    fsdp: bool = False,  # whether it is a step that gathers its layers over `parallel.fsdp`
    one_micro_batch: bool = False,  # whether it is a step with one micro-batch, whose layers gather their experts
    deterministic: bool = False,  # value of `train.deterministic`, on a GPU
    traced: bool = False,  # whether a trace has to show its instructions, on a GPU
    environment: Mapping[str, str] = os.environ,
) -> dict[str, bool | str]:
    """Return the compiler options of a program, except flags that `environment` sets for all programs."""
    preset = PRESETS.get(environment.get(APPLIED, "")) if _takes_flags(environment) else None
    settings = () if preset is None else preset.fsdp if fsdp else preset.one_micro_batch if one_micro_batch else ()
    settings += (DETERMINISTIC,) * deterministic + (TRACED,) * traced
    unset = (setting for setting in settings if _current(setting, environment) is None)
    return {setting.name.removeprefix("--"): setting.value == "true" or setting.value for setting in unset}


def describe_preset(environment: Mapping[str, str] = os.environ) -> str | None:
    """Describe the applied preset and its settings in `environment` in one line; None if none was applied."""
    preset = PRESETS.get(environment.get(APPLIED, ""))
    if preset is None:
        return None
    current = {setting: _current(setting, environment) for setting in preset.settings}
    ours = [setting.text for setting, text in current.items() if text == setting.text]
    yours = [text for setting, text in current.items() if text not in (None, setting.text)]
    missing = [setting.name for setting, text in current.items() if text is None]
    line = f"Preset {preset.name}: {' '.join(ours) or 'nothing set'}"
    line += f"; set otherwise: {' '.join(map(str, yours))}" if yours else ""
    return line + (f"; not set: {' '.join(missing)}" if missing else "")


def _takes_flags(environment: Mapping[str, str]) -> bool:
    """Return whether `XLA_FLAGS` holds flags; otherwise it names a file that XLA reads flags from."""
    flags = environment.get("XLA_FLAGS", "").strip()
    return flags == "" or flags.startswith("-")


def _current(setting: Setting, environment: Mapping[str, str]) -> str | None:
    """Return NAME=VALUE of the flag or variable in `environment`; None if it is not set."""
    if setting.is_flag:
        # A flag without a value is true; if a flag is repeated, XLA uses the last.
        texts = re.findall(rf"(?:^|\s)({setting.name}(?:=\S*)?)(?=\s|$)", environment.get("XLA_FLAGS", ""))
        return texts[-1] if texts else None
    names = [name for name in (setting.name, setting.alias) if name is not None and name in environment]
    return f"{names[0]}={environment[names[0]]}" if names else None
