"""The report of GPUs: `make gpu-report`, or `python -m benchmarks gpu_report`."""

import argparse
from collections.abc import Sequence
from typing import Any

from zaya_jax.lab.verbs import help_texts, run_verb
from zaya_jax.run.parser import Parser


def main(arguments: Sequence[str]) -> int:
    """Write the report; the exit status is 0, 1 if a part fails, or 2 for bad input."""
    name, texts = help_texts("python -m benchmarks", _run)
    parser = Parser(prog=f"python -m benchmarks {name}", **texts)
    parser.add_argument("--folder", metavar="FOLDER", default="benchmarks/gpu",
                        help="write FOLDER/DEVICE/PART.json (default: benchmarks/gpu)")  # fmt: skip
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="parts to run, also if they are recorded "
                        "already (default: all that this code and device have not recorded)")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=9.0, metavar="N",
                        help="start nothing that might end after N minutes (default: 9)")  # fmt: skip
    parser.add_argument("--commit", metavar="HASH", help="commit of this code (default: what git says)")
    parser.set_defaults(run=_run)
    return run_verb(parser, arguments)


def _run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Measure what training on this machine's GPUs computes, how fast, and whether it can be trusted.

    Each part runs in its own process and writes a JSON file. A table compares with the recording before, and with
    predictions. Run the command again to go on with the parts that there was no time for. Without a GPU, every part
    runs on the CPU at a small size. The exit status is 1 if a part fails.

    gpu_report --only step kernels
    """
    from benchmarks.gpu_report.runner import gpu_report

    return gpu_report(parsed.folder, parsed.only, parsed.minutes, parsed.commit)
