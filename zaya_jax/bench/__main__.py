"""`python -m zaya_jax.bench VERB`: measurements that print a ratio against a named peer."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from zaya_jax.config import load_config
from zaya_jax.errors import InputError
from zaya_jax.machine.command import add_flags, run_verb


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark; the exit status is 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m zaya_jax.bench", description="Measure against a peer.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    step = verbs.add_parser("step", help="time a training step against transformers")
    add_flags(step, repeats=7)
    step.add_argument("--whole", action="store_true",
                      help="time a whole step (micro-batches, clipping, optimizer, balancing) and the optimizer's "
                      "share of it, each side alone on the device; without it a forward and backward pass")  # fmt: skip
    step.add_argument("--dtype", choices=("float32", "bfloat16", "both"), help="dtype of the forward and backward pass "
                      "(default: both); a whole step computes in train.compute_dtype")  # fmt: skip
    step.add_argument("--config", metavar="FILE", help="configuration with model, batch and context, such as "
                      "configs/bench_8b.yaml for a GPU of 141 GB (default: 52.75M parameters)")  # fmt: skip
    step.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that override the file's")
    step.set_defaults(run=_step)
    data = verbs.add_parser("data", help="time packing against Grain, and preparing against datasets")
    add_flags(data, repeats=5)
    data.set_defaults(run=_data)
    checkpoint = verbs.add_parser("checkpoint", help="time saving against gathering and pickling, and against Orbax")
    add_flags(checkpoint, repeats=5, png="the times over the number of processes")
    checkpoint.add_argument("--gib", type=float, nargs="+", default=[0.25, 2.0], metavar="SIZE",
                            help="sizes of the state in GiB (default: 0.25 2)")  # fmt: skip
    checkpoint.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], metavar="N",
                            help="numbers of processes (default: 1 2 4)")  # fmt: skip
    checkpoint.add_argument("--folder", help="folder on the disk to measure (default: the system's temporary folder)")
    checkpoint.set_defaults(run=_checkpoint)
    kernels = verbs.add_parser("kernels", help="time each kernel against XLA, PyTorch and the device's limits")
    add_flags(kernels, repeats=5)
    kernels.add_argument("--only", metavar="CASE", nargs="+", default=[],
                         help="cases to time, such as attention (default: all)")  # fmt: skip
    kernels.set_defaults(run=_kernels)
    for name, text, steps in (
        ("optimizer", "count Muon's steps to the held-out loss that AdamW reaches", 150),
        ("balance", "count the steps that each balancing rule takes to an even expert load", 100),
        ("ablations", "compare held-out loss at equal FLOPs, each part of ZAYA1 taken away in turn", 150),
    ):
        verb = verbs.add_parser(name, help=text)
        verb.add_argument("--steps", type=int, default=steps, metavar="N",
                          help=f"number of training steps (default: {steps})")  # fmt: skip
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
        raise InputError("--dtype works without --whole only: use --config FILE and train.compute_dtype=bfloat16.")
    return bench_whole_step(config or default_whole_config(), parsed.repeats, parsed.output)


def _data(parsed: argparse.Namespace) -> dict[str, Any]:
    from zaya_jax.bench.data import Sizes, bench_data

    return bench_data(Sizes(), parsed.repeats)


def _checkpoint(parsed: argparse.Namespace) -> dict[str, Any]:
    from zaya_jax.bench.checkpoint import bench_checkpoint

    for name, values in (("--gib", parsed.gib), ("--processes", parsed.processes)):
        if any(value <= 0 for value in values):
            raise InputError(f"{name} is {' '.join(map(str, values))}, but must be numbers above zero.")
    return bench_checkpoint(parsed.gib, parsed.processes, parsed.repeats, parsed.png, parsed.folder)


def _kernels(parsed: argparse.Namespace) -> dict[str, Any]:
    from zaya_jax.bench.kernels import bench_kernels

    return bench_kernels(parsed.only, parsed.repeats, parsed.output)


def _trainings(parsed: argparse.Namespace) -> dict[str, Any]:
    from zaya_jax.bench.ablations import bench_ablations
    from zaya_jax.bench.balance import bench_balance
    from zaya_jax.bench.optimizer import bench_optimizer

    if parsed.steps < 20:
        raise InputError(f"--steps is {parsed.steps}, but must be at least 20: warm-up takes ten.")
    benches = {"optimizer": bench_optimizer, "balance": bench_balance, "ablations": bench_ablations}
    return benches[parsed.verb](parsed.steps, parsed.png)


if __name__ == "__main__":
    sys.exit(main())
