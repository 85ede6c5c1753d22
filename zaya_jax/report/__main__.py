"""`python -m zaya_jax.report`: write a page that shows how runs went."""

import sys
from collections.abc import Sequence
from pathlib import Path

from zaya_jax.config.checks import require
from zaya_jax.errors import InputError, printable
from zaya_jax.run.command_output import prepare_streams, run_command
from zaya_jax.run.files import expanded, explained, read_start, write_atomically
from zaya_jax.run.parser import Parser
from zaya_jax.run.writing import resolved

NAME = "report.html"  # of the page in a run folder
_MOST = 8  # runs of a page, as there are colors
_EXAMPLES = """examples:
  python -m zaya_jax.report runs/tiny
  python -m zaya_jax.report runs/tiny runs/bf16 --output compare.html
  python -m zaya_jax.report runs/tiny --config configs/tiny.yaml

You can report a run while it trains. Rerunning a command replaces its page."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = _parser().parse_args(arguments)
    return run_command(lambda: print(printable(write_report(options.runs, options.output, options.config))))


def _parser() -> Parser:
    text = "Write one HTML page about one or several runs: losses, speed, routing, faults, settings."
    parser = Parser(prog="python -m zaya_jax.report", description=text, epilog=_EXAMPLES)
    parser.add_argument("runs", nargs="+", metavar="RUN", help=f"run folders to show, at most {_MOST}")
    parser.add_argument("--output", metavar="FILE", help=f"HTML file (default: RUN/{NAME}; required with several runs)")
    parser.add_argument("--config", metavar="FILE", help="also list the settings that differ from this configuration")
    return parser


def write_report(runs: Sequence[str], output: str | None = None, config: str | None = None) -> str:
    """Write the page about run folders, and return a sentence that names it and its size.

    The HTML file `output` is `report.html` in the folder of the only run by default; the runs are compared with the
    configuration file `config`, too. Raises `InputError` or `OSError` if a file cannot be used; then nothing is
    written.
    """
    if len(runs) > _MOST:
        raise InputError(f"{len(runs)} runs are named, but one page shows at most {_MOST}.")
    if output is None and len(runs) > 1:
        raise InputError("--output is missing: with several runs, name the HTML file to write.")
    path = expanded(f"{runs[0]}/{NAME}" if output is None else output)
    from zaya_jax.aegis.report.page import MARK, render
    from zaya_jax.aegis.report.run_data import read_runs

    read = read_runs(runs)
    if path.suffix != ".html":
        raise InputError(f"--output is '{path}', but must end in .html.")
    require(path.parent.is_dir(), "--output", str(path), "a file in an existing folder")
    if path.exists():
        _check_replaced(path, MARK.encode())
    page = render(read, config)
    with explained(f"{path} cannot be written", " Name another file with --output."):
        write_atomically(resolved(path), page)
    return f"Wrote {path} ({path.stat().st_size / 1e6:.1f} MB). Open it in a browser."


def _check_replaced(path: Path, mark: bytes) -> None:
    if not path.is_file():
        raise InputError(f"The page {path} exists and is not a file. Name another file with --output.")
    if read_start(path, len(mark)) != mark:
        raise InputError(f"The page {path} exists and is not a run report. Name another file with --output.")


if __name__ == "__main__":
    prepare_streams()
    sys.exit(main())
