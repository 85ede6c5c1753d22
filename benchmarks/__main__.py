"""Run a benchmark: `python -m benchmarks NAME`.

Imports no jax: processes that benchmarks start, such as those of PyTorch, import this module first.
"""

import importlib
import sys
from collections.abc import Sequence

from zaya_jax.hardware.detection import use_huge_pages
from zaya_jax.run.command_output import prepare_streams
from zaya_jax.run.parser import Parser

BENCHMARKS = {
    "step": "training step, against transformers",
    "decode": "greedy decoding, against transformers",
    "engine": "steps of an engine against the copy rate, requests against batches, memory",
    "prefill": "attention of a prompt, against grouped-query and full attention",
    "data": "packing against Grain, data preparation against datasets",
    "checkpoint": "saving and restoring, against Orbax and gather-and-pickle",
    "ettr": "simulated: the part of time that a job of many nodes trains, with and without spares",
    "startup": "start of training by part, with empty caches and again",
    "kernels": "each Pallas kernel, against XLA, PyTorch and the device's peak",
    "gpu_report": "what training on this machine's GPUs computes, how fast, and whether it can be trusted",
    "adopt": "tables, predictions and pages from what GPUs have recorded, and from the file of a report",
    "ablations": "held-out loss at equal FLOPs, with one part of ZAYA1 or its recipe changed at a time",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark; the exit status is 0, 1 if something failed, or 2 for bad input."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in BENCHMARKS:
        return importlib.import_module(f"benchmarks.{name}").main(rest)
    listed = "\n".join(f"  {each:<14}{what}" for each, what in BENCHMARKS.items())
    epilog = f"benchmarks:\n{listed}\n\nexample: python -m benchmarks step --help"
    description = "Benchmark zaya_jax against other libraries, or compare training recipes."
    parser = Parser(prog="python -m benchmarks", description=description, epilog=epilog)
    parser.add_argument("name", choices=[*BENCHMARKS], metavar="NAME", help="benchmark to run")
    parser.parse_args([name])
    return 0


if __name__ == "__main__":
    prepare_streams()
    use_huge_pages()
    sys.exit(main())
