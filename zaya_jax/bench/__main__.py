"""Benchmark this project against others: `python -m zaya_jax.bench VERB`."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from zaya_jax.config import load_config
from zaya_jax.config.checks import require
from zaya_jax.errors import InputError
from zaya_jax.hardware.environment import keep_compilations
from zaya_jax.hardware.huge_pages import use_huge_pages
from zaya_jax.machine.command import add_flags, add_verb, run_verb, verb_examples
from zaya_jax.run.command import prepare_streams
from zaya_jax.run.parser import Parser

_PROGRAM = "python -m zaya_jax.bench"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark; the exit status is 0, 1 if a kernel did not run, or 2 for bad input."""
    return run_verb(_parser(), arguments)


def _parser() -> Parser:
    parser = Parser(
        prog=_PROGRAM, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Benchmark zaya_jax against other libraries, or compare training recipes.",
    )  # fmt: skip
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    step = add_verb(verbs, _PROGRAM, _step)
    add_flags(step, repeats=7)
    step.add_argument("--whole", action="store_true",
                      help="time the whole step, with micro-batches, clipping, optimizer and balancing, and report the "
                      "optimizer's share (default: forward and backward pass only)")  # fmt: skip
    step.add_argument("--dtype", choices=("float32", "bfloat16", "both"), help="dtype of the forward and backward pass "
                      "(default: both); --whole uses train.compute_dtype instead")  # fmt: skip
    step.add_argument("--config", metavar="FILE", help="configuration to take model, batch and context from, such as "
                      "configs/bench_8b.yaml on a GPU with 141 GB (default: a model of 52.75M parameters)")  # fmt: skip
    step.add_argument("overrides", nargs="*", metavar="section.key=value",
                      help="configuration value to override, such as model.num_layers=4")  # fmt: skip

    for run, flag, metavar, default, meaning in (
        (_decode, "--batch", "N", [1, 8], "numbers of prompts"),
        (_prefill, "--lengths", "TOKENS", [4096, 16384], "tokens of a prompt"),
    ):
        verb = add_verb(verbs, _PROGRAM, run)
        add_flags(verb, repeats=5)
        verb.add_argument(flag, type=int, nargs="+", default=default, metavar=metavar,
                          help=f"{meaning} (default: {default[0]} {default[1]})")  # fmt: skip
        verb.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: float32")

    add_flags(add_verb(verbs, _PROGRAM, _data), repeats=5)

    checkpoint = add_verb(verbs, _PROGRAM, _checkpoint)
    add_flags(checkpoint, repeats=5, png="save times against the number of processes")
    checkpoint.add_argument("--gib", type=float, nargs="+", default=[0.25, 2.0], metavar="SIZE",
                            help="state sizes to save, in GiB (default: 0.25 2)")  # fmt: skip
    checkpoint.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], metavar="N",
                            help="numbers of processes to save from (default: 1 2 4)")  # fmt: skip
    checkpoint.add_argument("--folder", metavar="FOLDER",
                            help="folder on the disk to measure (default: the system temporary folder)")  # fmt: skip

    for run in (_supervision, _startup):
        verb = add_verb(verbs, _PROGRAM, run)
        add_flags(verb, repeats=3)
        verb.add_argument("--config", metavar="FILE", default="configs/tiny.yaml",
                          help="configuration to train (default: configs/tiny.yaml)")  # fmt: skip
        verb.add_argument("overrides", nargs="*", metavar="section.key=value", help="configuration value to override")

    kernels = add_verb(verbs, _PROGRAM, _kernels)
    add_flags(kernels, repeats=5)
    kernels.add_argument("--only", metavar="CASE", nargs="+", default=[],
                         help="cases to time, such as attention (default: all)")  # fmt: skip

    report = add_verb(verbs, _PROGRAM, _gpu_report)
    report.add_argument("--folder", metavar="FOLDER", default="benchmarks/gpu",
                        help="write FOLDER/DEVICE/PART.json (default: benchmarks/gpu)")  # fmt: skip
    report.add_argument("--only", nargs="+", default=[], metavar="PART", help="parts to run, also if they are recorded "
                        "already (default: all that this code and device have not recorded)")  # fmt: skip
    report.add_argument("--minutes", type=float, default=9.0, metavar="N",
                        help="start nothing that might end after N minutes (default: 9)")  # fmt: skip
    report.add_argument("--commit", metavar="HASH", help="commit of this code (default: what git says)")

    for run, steps, meaning, curves in (
        (_optimizer, 150, "number of training steps", "held-out loss against steps"),
        (_balance, 100, "number of training steps before the data changes, and again after it",
         "expert-load entropy against steps"),
        (_ablations, 200, "number of training steps of the whole model", "differences from the whole model"),
    ):  # fmt: skip
        verb = add_verb(verbs, _PROGRAM, run)
        verb.add_argument("--steps", type=int, default=steps, metavar="N",
                          help=f"{meaning}, at least 20 (default: {steps})")  # fmt: skip
        if run is _optimizer:
            verb.add_argument("--tuned", metavar="FILE", help="use the best learning rates of an earlier --output "
                              "instead of tuning them, such as benchmarks/optimizer_cpu.json")  # fmt: skip
        add_flags(verb, png=curves)
    parser.epilog = verb_examples(verbs)
    return parser


def _step(parsed: argparse.Namespace) -> dict[str, Any]:
    """Time a training step against transformers in PyTorch.

    Prints tokens/s of both on the same random tokens and the same device.

    step --dtype float32 --repeats 3
    """
    from zaya_jax.bench.step import bench_step, default_config
    from zaya_jax.bench.whole_step import bench_whole_step, default_whole_config

    if parsed.overrides and not parsed.config:
        raise InputError(f"{parsed.overrides[0]} overrides a configuration file, but none is given: add --config FILE.")
    config = load_config(parsed.config, parsed.overrides) if parsed.config else None
    if not parsed.whole:
        dtypes = [parsed.dtype] if parsed.dtype in {"float32", "bfloat16"} else ["float32", "bfloat16"]
        return bench_step(config or default_config(), dtypes, parsed.repeats)
    if parsed.dtype:
        raise InputError("--dtype cannot be combined with --whole. Use --config FILE train.compute_dtype=bfloat16.")
    return bench_whole_step(config or default_whole_config(), parsed.repeats, parsed.output)


def _decode(parsed: argparse.Namespace) -> dict[str, Any]:
    """Time greedy decoding against generate of transformers in PyTorch.

    Generates 128 tokens after prompts of 512 with a model of 52.75M parameters; prints new tokens/s of both, the time
    to the first token, and our compilation.

    decode --batch 1 8 --output decode.json
    """
    from zaya_jax.bench.decode import bench_decode

    require(min(parsed.batch) >= 1, "--batch", min(parsed.batch), "at least 1")
    return bench_decode(parsed.batch, parsed.dtype, parsed.repeats)


def _prefill(parsed: argparse.Namespace) -> dict[str, Any]:
    """Time the attention of a prompt: CCA against grouped-query and full attention.

    Applies one attention layer of ZAYA1-8B, and others of the same width.

    prefill --lengths 4096
    """
    from zaya_jax.bench.prefill import CCA, bench_prefill

    for length in parsed.lengths:
        require(1 <= length <= CCA.max_positions, "--lengths", length, f"between 1 and {CCA.max_positions}")
    return bench_prefill(parsed.lengths, parsed.dtype, parsed.repeats)


def _data(parsed: argparse.Namespace) -> dict[str, Any]:
    """Time packing against Grain, and data preparation against datasets.

    Uses generated documents and the Python standard library as input, with Grain's fastest settings.

    data --repeats 3 --output data.json
    """
    from zaya_jax.bench.data import Sizes, bench_data

    return bench_data(Sizes(), parsed.repeats)


def _checkpoint(parsed: argparse.Namespace) -> dict[str, Any]:
    """Time saving and restoring against Orbax and gather-and-pickle.

    Measures how long a save blocks training, when the checkpoint is durable, and how long it takes to restore, with
    several processes on one disk.

    checkpoint --gib 2 --processes 1 4 --png saving.png
    """
    from zaya_jax.bench.checkpoint import bench_checkpoint

    for name, values in (("--gib", parsed.gib), ("--processes", parsed.processes)):
        require(min(values) > 0, name, min(values), "above 0")
    return bench_checkpoint(parsed.gib, parsed.processes, parsed.repeats, parsed.png, parsed.folder)


def _supervision(parsed: argparse.Namespace) -> dict[str, Any]:
    """Time training under a supervisor against training without one.

    Trains a configuration with and without `aegis run`, in turn, and times the progress record.

    supervision --config configs/tiny.yaml phases.0.tokens=122_880 --output supervision.json
    """
    from zaya_jax.bench.supervision import bench_supervision

    load_config(parsed.config, parsed.overrides)  # so that a mistake is named before anything runs
    return bench_supervision(parsed.config, parsed.overrides, parsed.repeats)


def _startup(parsed: argparse.Namespace) -> dict[str, Any]:
    """Time the start of training by part, with empty caches and again.

    Starts a run with empty caches, ends it after its first step, and starts it again.

    startup --config configs/tiny.yaml --output startup.json
    """
    from zaya_jax.bench.startup import bench_startup

    load_config(parsed.config, parsed.overrides)
    return bench_startup(parsed.config, parsed.overrides, parsed.repeats)


def _kernels(parsed: argparse.Namespace) -> dict[str, Any]:
    """Time each Pallas kernel against XLA, PyTorch and the device's peak.

    Without a GPU, the kernels are emulated at a small size, and the times do not predict those of a GPU.

    kernels --only attention --output attention.json
    """
    from zaya_jax.bench.kernels import bench_kernels

    return bench_kernels(parsed.only, parsed.repeats, parsed.output)


def _gpu_report(parsed: argparse.Namespace) -> dict[str, Any]:
    """Measure what training on this machine's GPUs computes, how fast, and whether it can be trusted.

    Each part runs in its own process and writes a JSON file. A table compares with the recording before, and with
    predictions. Run the command again to go on with the parts that there was no time for. Without a GPU, every part
    runs on the CPU at a small size. The exit status is 1 if a part fails.

    gpu-report --only step kernels
    """
    from zaya_jax.bench.gpu_report.runner import gpu_report

    return gpu_report(parsed.folder, parsed.only, parsed.minutes, parsed.commit)


def _optimizer(parsed: argparse.Namespace) -> dict[str, Any]:
    """Count the steps that Muon needs to reach AdamW's final held-out loss.

    Trains models of 1.65M parameters with three seeds, one training per core. The learning rates of both are tuned on a
    grid first.

    optimizer --steps 100 --png optimizer.png
    """
    from zaya_jax.bench.optimizer import bench_optimizer

    _prepare_trainings(parsed)
    return bench_optimizer(parsed.steps, parsed.png, parsed.tuned)


def _balance(parsed: argparse.Namespace) -> dict[str, Any]:
    """Count the steps that each balancing rule needs to even out the expert load.

    Trains models of 1.65M parameters with three seeds, one training per core. Training starts with a skewed router, and
    the data changes half-way.

    balance --steps 100 --png balance.png
    """
    from zaya_jax.bench.balance import bench_balance

    _prepare_trainings(parsed)
    return bench_balance(parsed.steps, parsed.png)


def _ablations(parsed: argparse.Namespace) -> dict[str, Any]:
    """Compare held-out loss at equal FLOPs with one part of ZAYA1 removed at a time.

    Trains models of 1.65M parameters with three seeds, one training per core. The learning rates of each variant are
    tuned on the first seed.

    ablations --steps 100 --png ablations.png
    """
    from zaya_jax.bench.ablations import bench_ablations

    _prepare_trainings(parsed)
    return bench_ablations(parsed.steps, parsed.png)


def _prepare_trainings(parsed: argparse.Namespace) -> None:
    require(parsed.steps >= 20, "--steps", parsed.steps, "at least 20: the warm-up takes 10 steps")
    keep_compilations()  # the seeds of a variant run the same programs


if __name__ == "__main__":
    prepare_streams()
    use_huge_pages()
    sys.exit(main())
