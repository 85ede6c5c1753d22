"""The report of GPUs: `make gpu-report`, or `python -m benchmarks gpu_report`."""

import argparse
from typing import Any

from benchmarks.benchmark_command import command, flag


def run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Measure what training on this machine's GPUs computes, how fast, and whether it can be trusted.

    Each part runs in its own process and writes a JSON file. A table compares with the recording before, and with
    predictions. Run the command again to go on with the parts that there was no time for. Without a GPU, every part
    runs on the CPU at a small size. The exit status is 1 if a part fails.

    gpu_report --only step kernels
    """
    from benchmarks.gpu_report.runner import gpu_report

    return gpu_report(parsed.folder, parsed.only, parsed.minutes, parsed.commit)


_ONLY = "parts to run, also if they are recorded already (default: all that this code and device have not recorded)"
FLAGS = {
    "--folder": flag("benchmarks/gpu", "FOLDER", "write FOLDER/DEVICE/PART.json"),
    "--only": {"nargs": "+", "default": [], "metavar": "PART", "help": _ONLY},
    "--minutes": flag(9.0, "N", "start nothing that might end after N minutes"),
    "--commit": {"metavar": "HASH", "help": "commit of this code (default: what git says)"},
}
main = command(run, FLAGS, output=False)
