"""What the commands `machine` and `bench` share: flags, the result's file, and refusals."""

import argparse
import sys
from collections.abc import Sequence

from zaya_jax.errors import InputError
from zaya_jax.machine.result import check_request, write_result


def add_flags(verb: argparse.ArgumentParser, *, repeats: int | None = None, png: str | None = None) -> None:
    """Add `--output`; `--repeats` with a default, and `--png` with what it draws, if they are given."""
    verb.add_argument("--output", metavar="FILE", help="file to write the result to, as JSON")
    if repeats is not None:
        verb.add_argument("--repeats", type=int, default=repeats, metavar="N",
                          help=f"number of timed passes of each side (default: {repeats})")  # fmt: skip
    if png is not None:
        verb.add_argument("--png", metavar="FILE", help=f"file to draw {png} to")


def run_verb(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> int:
    """Call the verb's `run` and write the result that it returns to `--output`.

    The exit status is 0, 1 if something in the result has `failed`, or 2 for bad input.
    """
    parsed = parser.parse_args(arguments)
    files = {f"--{name}": getattr(parsed, name, None) for name in ("output", "png")}
    try:
        check_request(getattr(parsed, "repeats", 1), files)
        result = parsed.run(parsed)
    except InputError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    write_result(result, files["--output"])
    return 1 if result.get("failed") else 0
