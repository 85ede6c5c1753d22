"""`python -m zaya_jax.bench VERB`: measurements that print a ratio against a named peer."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from zaya_jax.config import load_config
from zaya_jax.errors import InputError
from zaya_jax.machine.command import add_flags, run_verb

MOVED = ("smoke", "context", "launches", "machine-code")  # verbs of `zaya_jax.machine` that were here


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark; the exit status is 0, or 2 for bad input."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in MOVED:
        print(f"Error: this command is now `python -m zaya_jax.machine {arguments[0]}`.", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(prog="python -m zaya_jax.bench", description="Measure against a peer.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    step = verbs.add_parser("step", help="a pass, or a whole optimizer step, against transformers' zaya")
    add_flags(step, repeats=7)
    step.add_argument("--whole", action="store_true",
                      help="a whole step, as training does it: gradients of micro-batches added up, clipping, Muon, "
                      "balancing, and the optimizer's share of it; each side has the device to itself. Without it a "
                      "forward and backward pass, the sides interleaved")  # fmt: skip
    step.add_argument("--dtype", choices=("float32", "bfloat16", "both"),
                      help="of a pass (default both); a whole step computes in train.compute_dtype")  # fmt: skip
    step.add_argument("--config", metavar="FILE", help="model, batch and context, such as configs/bench_8b.yaml for a "
                      "whole step on a GPU of 141 GB (default: the 52.75M-parameter one)")  # fmt: skip
    step.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that override the file's")
    step.set_defaults(run=_step)
    data = verbs.add_parser("data", help="packing against Grain's, preparing against datasets, and the memory of both")
    add_flags(data, repeats=5)
    data.set_defaults(run=_data)
    checkpoint = verbs.add_parser("checkpoint", help="saving over processes against gathering on one and pickling")
    add_flags(checkpoint, repeats=5, png="the times over the number of processes")
    checkpoint.add_argument("--gib", type=float, nargs="+", default=[0.25, 2.0],
                            help="sizes of a state (default: 0.25 2)")  # fmt: skip
    checkpoint.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], help="of a job (default: 1 2 4)")
    checkpoint.add_argument("--folder", metavar="FOLDER", help="on the disk that is measured")
    checkpoint.set_defaults(run=_checkpoint)
    kernels = verbs.add_parser("kernels", help="each kernel against XLA, PyTorch and what the device can do")
    add_flags(kernels, repeats=5)
    kernels.add_argument("--only", metavar="CASE", nargs="+", default=[], help="cases by name, such as attention")
    kernels.set_defaults(run=_kernels)
    for name, text, steps in (
        ("optimizer", "Muon for matrices against AdamW for everything: steps to the same held-out loss", 150),
        ("balance", "rules of balancing: steps until the expert load is even", 100),
        ("ablations", "held-out loss at equal FLOPs with parts of ZAYA1 taken away", 150),
    ):
        verb = verbs.add_parser(name, help=text)
        verb.add_argument("--steps", type=int, default=steps, help=f"of a training (default {steps})")
        add_flags(verb, png="the curves")
        verb.set_defaults(run=_trainings)
    return run_verb(parser, arguments)


def _step(parsed: argparse.Namespace) -> dict[str, Any]:
    from zaya_jax.bench.step import bench_step, default_config
    from zaya_jax.bench.whole_step import bench_whole_step, default_whole_config

    if parsed.overrides and not parsed.config:
        raise InputError(f"{parsed.overrides[0]} overrides a configuration, but there is none: add --config FILE.")
    config = load_config(parsed.config, parsed.overrides) if parsed.config else None
    if not parsed.whole:
        dtypes = [parsed.dtype] if parsed.dtype in {"float32", "bfloat16"} else ["float32", "bfloat16"]
        return bench_step(config or default_config(), dtypes, parsed.repeats)
    if parsed.dtype:
        raise InputError("--dtype is of a pass: give a whole step a --config FILE and train.compute_dtype=bfloat16.")
    return bench_whole_step(config or default_whole_config(), parsed.repeats, parsed.output)


def _data(parsed: argparse.Namespace) -> dict[str, Any]:
    from zaya_jax.bench.data import Sizes, bench_data

    return bench_data(Sizes(), parsed.repeats)


def _checkpoint(parsed: argparse.Namespace) -> dict[str, Any]:
    from zaya_jax.bench.checkpoint import Sizes, bench_checkpoint

    for name, values in (("--gib", parsed.gib), ("--processes", parsed.processes)):
        if any(value <= 0 for value in values):
            raise InputError(f"{name} is {' '.join(map(str, values))}, but must be numbers above zero.")
    sizes = Sizes(tuple(parsed.gib), tuple(parsed.processes))
    return bench_checkpoint(sizes, parsed.repeats, parsed.png, parsed.folder)


def _kernels(parsed: argparse.Namespace) -> dict[str, Any]:
    from zaya_jax.bench.kernels import bench_kernels

    return bench_kernels(parsed.only, parsed.repeats, parsed.output)


def _trainings(parsed: argparse.Namespace) -> dict[str, Any]:
    from zaya_jax.bench.ablations import bench_ablations
    from zaya_jax.bench.balance import bench_balance
    from zaya_jax.bench.optimizer import bench_optimizer

    if parsed.steps < 20:
        raise InputError(f"--steps is {parsed.steps}, but must be at least 20: rates rise over the first ten.")
    benches = {"optimizer": bench_optimizer, "balance": bench_balance, "ablations": bench_ablations}
    return benches[parsed.verb](parsed.steps, parsed.png)


if __name__ == "__main__":
    sys.exit(main())
