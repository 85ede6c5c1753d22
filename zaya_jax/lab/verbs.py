"""Flags, output file and error handling that the commands of `machine` and the benchmarks share."""

import argparse
import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zaya_jax.config.checks import require
from zaya_jax.errors import ExitCode, InputError, exit_message
from zaya_jax.hardware.presets import Preset
from zaya_jax.lab.result import write_result
from zaya_jax.run.command_output import run_command

Run = Callable[[argparse.Namespace], dict[str, Any]]
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_COLUMNS = 80  # width of descriptions in `--help`


def add_verb(verbs: Any, program: str, run: Run) -> argparse.ArgumentParser:
    """Add a verb to the result of `add_subparsers`, with `help_texts`; the first paragraph is its summary."""
    name, texts = help_texts(program, run)
    summary = inspect.cleandoc(run.__doc__ or "").partition("\n\n")[0].replace("\n", " ").removesuffix(".")
    verb = verbs.add_parser(name, help=f"{summary[0].lower()}{summary[1:]}", **texts)
    verb.set_defaults(run=run)
    return verb


def help_texts(program: str, run: Run) -> tuple[str, dict[str, Any]]:
    """Return a verb's name and its parser's texts, from its docstring: a description, and an example with the name."""
    *description, example = inspect.cleandoc(run.__doc__ or "").split("\n\n")
    text = textwrap.fill(" ".join(description), _COLUMNS, break_on_hyphens=False)
    return example.split()[0], {"description": text, "epilog": f"example: {program} {example}"}


def add_config(verb: argparse.ArgumentParser) -> None:
    """Add a configuration file and its overrides."""
    verb.add_argument("config", metavar="CONFIG", help="configuration file, such as configs/zaya1_8b.yaml")
    verb.add_argument("overrides", nargs="*", metavar="section.key=value", help="configuration values to override")


def add_flags(verb: argparse.ArgumentParser, *, repeats: int | None = None, png: str | None = None) -> None:
    """Add `--output`, `--repeats` unless its default is None, and `--png` unless it plots nothing."""
    verb.add_argument("--output", metavar="FILE", help="write the result to FILE as JSON")
    if repeats is not None:
        text = f"number of timed repetitions of each measurement (default: {repeats})"
        verb.add_argument("--repeats", type=int, default=repeats, metavar="N", help=text)
    if png is not None:
        verb.add_argument("--png", metavar="FILE", help=f"plot {png} to FILE, as PNG")


def parse_bytes(flag: str, text: str) -> int:
    """Return a number of bytes written like 8, 64K, 16M or 1G; InputError, which names `flag`, for other texts."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text.upper())
    if not match or int(match[1]) == 0:
        raise InputError(f"{flag} is {text!r}, but must be a number of bytes, such as 8, 64K, 16M or 1G.")
    return int(match[1]) * _UNITS[match[2]]


def run_in_job(parsed: argparse.Namespace, preset: Preset, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `work` returns in the job of `add_job`: an error ends all processes, and process 0 writes files."""
    from zaya_jax.job.multihost import is_primary, join

    flags = (parsed.coordinator, parsed.processes, parsed.process)
    peers = join(flags, preset.join_seconds, preset.peer_timeout)
    try:
        result = work()
    except Exception as error:
        if peers is not None:
            peers.leave(*exit_message(error))
        raise
    if not is_primary():
        parsed.output = parsed.png = None
    return result


def run_verb(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> int:
    """Run a verb, and write its result; returns 0, 1 if the result says that something `failed`, or 2 for bad input."""
    parsed = parser.parse_args(arguments)

    def run() -> int:
        if (repeats := getattr(parsed, "repeats", None)) is not None:
            require(repeats >= 1, "--repeats", repeats, "at least 1")
        for flag in ("output", "png"):
            if name := getattr(parsed, flag, None):
                is_usable = Path(name).resolve().parent.is_dir() and not Path(name).is_dir()
                require(is_usable, f"--{flag}", name, "a file in an existing folder")
        result = parsed.run(parsed)
        write_result(result, getattr(parsed, "output", None))
        if getattr(parsed, "png", None):
            from zaya_jax.lab.result_plots import draw

            draw(parsed.verb, Path(parsed.png), result)
        return ExitCode.STOPPED if result.get("failed") else ExitCode.OK

    return run_command(run)
