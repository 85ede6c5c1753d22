"""What the commands `machine` and `bench` share: flags, and how a request that cannot be met is told."""

import argparse
import sys
from collections.abc import Sequence

from zaya_jax.errors import InputError
from zaya_jax.machine.result import check_request


def add_flags(verb: argparse.ArgumentParser, *, repeats: int | None = None, png: str | None = None) -> None:
    """Add `--output`; `--repeats` with a default, and `--png` with what it draws, if they are given."""
    verb.add_argument("--output", metavar="FILE", help="write the result there as JSON")
    if repeats is not None:
        verb.add_argument("--repeats", type=int, default=repeats,
                          help=f"timed passes of each side, interleaved (default {repeats})")  # fmt: skip
    if png is not None:
        verb.add_argument("--png", metavar="FILE", help=f"draw {png} there")


def run_verb(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> int:
    """Parse `arguments` and call the verb's `run`; the exit status is what it returns, or 2 for bad input."""
    parsed = parser.parse_args(arguments)
    files = {f"--{name}": getattr(parsed, name, None) for name in ("output", "png")}
    try:
        check_request(getattr(parsed, "repeats", 1), files)
        return parsed.run(parsed) or 0
    except InputError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
