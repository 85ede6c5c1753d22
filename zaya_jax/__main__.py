"""All commands under one name: `zaya COMMAND …`, or `python -m zaya_jax COMMAND …`."""

import os
import sys
from collections.abc import Callable, Sequence

from zaya_jax import __version__
from zaya_jax.errors import ExitCode, did_you_mean
from zaya_jax.run.command_output import output_status, prepare_streams
from zaya_jax.run.signals import warn
from zaya_jax.run.typed_name import TYPED

# The arguments of `python -m`, and what the command does.
COMMANDS: dict[str, tuple[tuple[str, ...], str]] = {
    "train": (("zaya_jax.main",), "train a model, or resume a run"),
    "data": (("zaya_jax.data",), "prepare and inspect training data"),
    "generate": (("zaya_jax.generate",), "continue texts with a model, or chat with it"),
    "evaluate": (("zaya_jax.evaluate",), "score a model"),
    "report": (("zaya_jax.report",), "write one HTML page about one or several runs"),
    "checkpoint": (("zaya_jax.checkpoint",), "list, verify, average and export checkpoints"),
    "aegis": (("zaya_jax.aegis",), "keep a training run alive"),
    "config": (("zaya_jax.config",), "explain configuration keys"),
    "machine": (("zaya_jax.machine",), "describe, test and time this machine's devices"),
    "doctor": (("zaya_jax.machine", "doctor"), "check this machine and its installation"),
}


def main(
    arguments: Sequence[str] | None = None, replace: Callable[[str, list[str], dict[str, str]], None] = os.execve
) -> int:
    """Run a command in place of this process, as `python -m` would; `replace` does so with a program and environment.

    Returns the exit status without a command to run: 0 for the help and the version, or 1 if they are lost; 2 for an
    unknown command.
    """
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for candidates
        from zaya_jax.completion import complete

        complete(COMMANDS)
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in {"-h", "--help"}:
        print(_help())
        return output_status()
    if command == "--version":
        print(f"zaya_jax {__version__}")
        return output_status()
    if command not in COMMANDS:
        meant = did_you_mean(command, COMMANDS)
        warn(f"Error: zaya has no command {command!r}.{meant} Its commands are {', '.join(COMMANDS)}.")
        return ExitCode.BAD_INPUT
    typed = "python -m zaya_jax" if sys.argv[0].endswith("__main__.py") else "zaya"
    safe = ["-P"] if typed == "zaya" else []  # an installed command imports nothing from the current folder
    module, *verb = COMMANDS[command][0]
    environment = {**os.environ, TYPED: f"{typed} {command}" if verb else typed}
    replace(sys.executable, [sys.executable, *safe, "-m", module, *verb, *rest], environment)
    return 0


def _help() -> str:
    rows = "\n".join(f"  {name:<12}{summary}" for name, (_, summary) in COMMANDS.items())
    return f"""usage: zaya COMMAND …

Pretrain, extend, fine-tune, inspect, evaluate and export ZAYA1 models.

commands:
{rows}

`zaya COMMAND --help` describes a command, and `zaya --version` prints the version. Each is a module: `zaya generate` is
`python -m zaya_jax.generate`, and `zaya train` is `python -m zaya_jax.main`. For Tab completion in bash, run:
eval "$(register-python-argcomplete zaya)"

examples:
  zaya train configs/tiny.yaml
  zaya generate runs/tiny --prompt 'def '
  zaya doctor"""


if __name__ == "__main__":
    prepare_streams()
    sys.exit(main())
