"""`python -m zaya_jax.bench VERB`: measurements that print a ratio against a named peer."""

import argparse
import sys
from collections.abc import Sequence

from zaya_jax.config import load_config
from zaya_jax.errors import InputError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark; the exit status is 0, 1 where a part of the smoke test failed, or 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m zaya_jax.bench", description="Measure against a peer.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    step = verbs.add_parser("step", help="a pass, or a whole optimizer step, against transformers' zaya")
    _add_common(step, repeats=7)
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
    _add_common(data, repeats=5)
    data.set_defaults(run=_data)
    context = verbs.add_parser("context", help="attention over a sequence on several devices: ring against all-gather")
    _add_common(context, repeats=5)
    context.add_argument("--png", metavar="FILE", help="draw the memory over the number of devices there")
    context.set_defaults(run=_context)
    saving = verbs.add_parser("checkpoint", help="saving over processes against gathering on one and pickling")
    _add_common(saving, repeats=5)
    saving.add_argument("--gib", type=float, nargs="+", default=[0.25, 2.0], help="sizes of a state (default: 0.25 2)")
    saving.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], help="of a job (default: 1 2 4)")
    saving.add_argument("--folder", metavar="FOLDER", help="on the disk that is measured")
    saving.add_argument("--png", metavar="FILE", help="draw the times over the number of processes there")
    saving.set_defaults(run=_checkpoint)
    kernels = verbs.add_parser("kernels", help="each kernel against XLA, PyTorch and what the device can do")
    _add_common(kernels, repeats=5)
    kernels.add_argument("--only", metavar="CASE", nargs="+", default=[], help="cases by name, such as attention")
    kernels.set_defaults(run=_kernels)
    for name, text in (
        ("machine-code", "registers, shared memory and spills of each kernel on three GPUs, none of which is needed"),
        ("launches", "launches of a layer and bytes of each operation, with kernels and without"),
    ):
        verb = verbs.add_parser(name, help=text)
        verb.add_argument("--output", metavar="FILE", help="write the result there as JSON")
        verb.set_defaults(run=_without_gpu)
    smoke = verbs.add_parser("smoke", help="whether everything works on this machine's devices, as one JSON to post")
    smoke.add_argument("--output", metavar="FILE", help="the JSON (default: benchmarks/smoke_DEVICE.json)")
    smoke.set_defaults(run=_smoke)
    for name, text, steps in (
        ("optimizer", "Muon for matrices against AdamW for everything: steps to the same held-out loss", 150),
        ("balance", "rules of balancing: steps until the expert load is even", 100),
        ("ablations", "held-out loss at equal FLOPs with parts of ZAYA1 taken away", 150),
    ):
        verb = verbs.add_parser(name, help=text)
        verb.add_argument("--steps", type=int, default=steps, help=f"of a training (default {steps})")
        verb.add_argument("--output", metavar="FILE", help="write the result there as JSON")
        verb.add_argument("--png", metavar="FILE", help="draw the curves there")
        verb.set_defaults(run=_trainings)
    given = parser.parse_args(arguments)
    try:
        return given.run(given) or 0
    except InputError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2


def _add_common(verb: argparse.ArgumentParser, *, repeats: int) -> None:
    verb.add_argument("--repeats", type=int, default=repeats,
                      help=f"timed passes of each side, interleaved (default {repeats})")  # fmt: skip
    verb.add_argument("--output", metavar="FILE", help="write the result there as JSON")


def _step(given: argparse.Namespace) -> None:
    from zaya_jax.bench.step import bench_step, default_config
    from zaya_jax.bench.whole_step import bench_whole_step, default_whole_config

    if given.overrides and not given.config:
        raise InputError(f"{given.overrides[0]} overrides a configuration, but none is given: add --config FILE.")
    config = load_config(given.config, given.overrides) if given.config else None
    if not given.whole:
        dtypes = [given.dtype] if given.dtype in {"float32", "bfloat16"} else ["float32", "bfloat16"]
        bench_step(config or default_config(), dtypes, given.repeats, given.output)
        return
    if given.dtype:
        raise InputError("--dtype is of a pass: give a whole step a --config FILE and train.compute_dtype=bfloat16.")
    bench_whole_step(config or default_whole_config(), given.repeats, given.output)


def _data(given: argparse.Namespace) -> None:
    from zaya_jax.bench.data import Sizes, bench_data

    bench_data(Sizes(), given.repeats, given.output)


def _context(given: argparse.Namespace) -> None:
    from zaya_jax.bench.context import bench_context

    bench_context(None, given.repeats, given.output, given.png)


def _checkpoint(given: argparse.Namespace) -> None:
    from zaya_jax.bench.checkpoint import Sizes, bench_checkpoint

    for name, values in (("--gib", given.gib), ("--processes", given.processes)):
        if any(value <= 0 for value in values):
            raise InputError(f"{name} is {' '.join(map(str, values))}, but must be numbers above zero.")
    sizes = Sizes(tuple(given.gib), tuple(given.processes))
    bench_checkpoint(sizes, given.repeats, given.output, given.png, given.folder)


def _kernels(given: argparse.Namespace) -> None:
    from zaya_jax.bench.kernels import bench_kernels

    bench_kernels(given.only, given.repeats, given.output)


def _without_gpu(given: argparse.Namespace) -> None:
    from zaya_jax.machine.proxies.launches import bench_launches
    from zaya_jax.machine.proxies.machine_code import bench_machine_code

    benches = {"machine-code": bench_machine_code, "launches": bench_launches}
    benches[given.verb](given.output)


def _smoke(given: argparse.Namespace) -> int:
    from zaya_jax.machine.smoke import smoke

    return 1 if smoke(given.output)["failed"] else 0


def _trainings(given: argparse.Namespace) -> None:
    from zaya_jax.bench.ablations import bench_ablations
    from zaya_jax.bench.balance import bench_balance
    from zaya_jax.bench.optimizer import bench_optimizer

    if given.steps < 20:
        raise InputError(f"--steps is {given.steps}, but must be at least 20: rates rise over the first ten.")
    benches = {"optimizer": bench_optimizer, "balance": bench_balance, "ablations": bench_ablations}
    benches[given.verb](given.steps, given.output, given.png)


if __name__ == "__main__":
    sys.exit(main())
