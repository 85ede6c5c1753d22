"""`python -m zaya_jax.checkpoint VERB`: list, verify, compare, prune, average, import, export; roll a run back."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from zaya_jax.config import CheckpointConfig
from zaya_jax.errors import ExitCode, InputError, printable
from zaya_jax.run.checkpoints import Checkpoint
from zaya_jax.run.command_output import prepare_streams, run_command
from zaya_jax.run.parser import Parser
from zaya_jax.run.run import open_run
from zaya_jax.run.table import size_text

_NAME = "RUN_DIR (its newest checkpoint), RUN_DIR@PHASE (the last one of a phase) or RUN_DIR/checkpoints/STEP"
_DTYPES = ["bfloat16", "float16", "float32"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see `ExitCode`."""
    options = _parser().parse_args(arguments)
    return run_command(lambda: _run(options))


def _argument(name: str, what: str, metavar: str | None = None, **options: Any) -> tuple[str, dict[str, Any]]:
    return name, {"help": what, **options} | ({"metavar": metavar} if metavar else {})


def _parser() -> Parser:
    program = "python -m zaya_jax.checkpoint"
    plain = argparse.RawDescriptionHelpFormatter  # keeps the example on one line
    what, example = "Manage the checkpoints of runs.", f"example: {program} ls runs/tiny"
    parser = Parser(prog=program, description=what, epilog=example, formatter_class=plain)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, (what, example, *options) in _verbs().items():
        about, epilog = f"{what[0].upper()}{what[1:]}.", f"example: {program} {name} {example}"
        verb = verbs.add_parser(name, help=what, description=about, epilog=epilog, formatter_class=plain)
        for option, settings in options:
            verb.add_argument(option, **settings)
    return parser


def _verbs() -> dict[str, tuple[Any, ...]]:
    """Return verb → what it does, an example, and its arguments."""
    argument = _argument
    run_dir = argument("run_dir", "folder of the run", "RUN_DIR", type=Path)
    checkpoint = argument("checkpoint", _NAME, "CHECKPOINT")
    hf_folder = argument("folder", "transformers folder: FOLDER or hf:FOLDER", "FOLDER")
    output = argument("--output", "new run folder", "RUN_DIR", required=True, type=Path)
    base = "base model of the adapters (default: init_from of {})"
    layout = "tensor layout: hf for current transformers, legacy for the first release (default: hf)"
    carry = "folder whose tokenizer and generation files are copied (default: the run's)"
    peft = "write adapters as a folder of the peft library instead of merging them"
    best = "also keep the N checkpoints with the lowest held-out loss"
    pair = "runs/tiny/checkpoints/200 runs/tiny/checkpoints/250"
    return {
        "ls": ("list the checkpoints of a run and its status", "runs/tiny", run_dir),
        "verify": (
            "read a checkpoint and compare it with its checksums",
            "runs/tiny --all",
            checkpoint,
            argument("--all", "verify every checkpoint of the run RUN_DIR", action="store_true"),
        ),
        "inspect": ("print a checkpoint's metadata and the shape and norm of each array", "runs/tiny", checkpoint),
        "diff": (
            "list the arrays and configuration keys that differ between two checkpoints",
            pair,
            argument("first", _NAME, "CHECKPOINT"),
            argument("second", "checkpoint to compare with", "CHECKPOINT"),
        ),
        "prune": (
            "remove old checkpoints of a run",
            "runs/tiny --keep 2 --dry-run",
            run_dir,
            argument("--keep", "keep the newest N checkpoints (at least 1)", "N", type=int, required=True),
            argument("--keep-every", "also keep checkpoints at multiples of STEPS", "STEPS", type=int),
            argument("--keep-best", best, "N", type=int, default=0),
            argument("--quarantined", "also remove quarantined checkpoints", action="store_true"),
            argument("--dry-run", "print what would be removed, and remove nothing", action="store_true"),
        ),
        "rollback": (
            "quarantine newer checkpoints, so that a run resumes from an older one",
            "runs/tiny 200",
            run_dir,
            argument("step", "step of the checkpoint to resume from", "STEP", type=int),
        ),
        "average": (
            "average checkpoints into a new one, usable as init_from",
            f"{pair} --output runs/average",
            argument("checkpoints", _NAME, "CHECKPOINT", nargs="+"),
            output,
            argument("--base", base.format("the newest checkpoint's run"), "SOURCE"),
        ),
        "import-hf": (
            "convert a transformers folder to a checkpoint",
            "models/ZAYA1-8B --output runs/zaya1_8b",
            hf_folder,
            output,
            argument("--allow-nonfinite", "import NaN and infinite values too", action="store_true"),
        ),
        "export-hf": (
            "convert a checkpoint to a folder that transformers, vLLM and SGLang load",
            "runs/tiny exported/tiny --dtype float32",
            argument("checkpoint", f"{_NAME}, or hf:FOLDER", "CHECKPOINT"),
            argument("folder", "new or empty output folder", "FOLDER", type=Path),
            argument("--dtype", "dtype of the parameters (default: bfloat16)", default="bfloat16", choices=_DTYPES),
            argument("--layout", layout, default="hf", choices=["hf", "legacy"]),
            argument("--carry", carry, "FOLDER", type=Path),
            argument("--base", base.format("their run"), "SOURCE"),
            argument("--peft", peft, action="store_true"),
        ),
        "verify-hf": ("compare logits of the released 8B with those of transformers", "models/ZAYA1-8B", hf_folder),
    }


def _run(options: argparse.Namespace) -> ExitCode:
    lines, good = _outcome(options)
    for line in lines:
        print(printable(line))
    return ExitCode.OK if good else ExitCode.STOPPED


def _outcome(options: argparse.Namespace) -> tuple[Iterable[str], bool]:
    """Return what a verb prints and whether all is well; it imports only what it needs, so `ls` works without jax."""
    match options.verb:
        case "ls":
            return _list_run(options.run_dir), True
        case "average":
            from zaya_jax.weights.average import average_checkpoints

            folder = average_checkpoints(options.checkpoints, options.output, options.base)
            return [f"Averaged {len(options.checkpoints)} checkpoints into {folder}."], True
        case "import-hf":
            from zaya_jax.weights.interop import import_hf

            return [import_hf(options.folder, options.output, options.allow_nonfinite)], True
        case "export-hf":
            from zaya_jax.weights.interop import export_hf, export_peft

            if options.peft and options.layout != "hf":
                why = "transformers loads adapters onto the hf layout"
                raise InputError(f"--layout legacy cannot be combined with --peft: {why}.")
            source, carry, base = options.checkpoint, options.carry, options.base
            if options.peft:
                return [export_peft(source, options.folder, options.dtype, carry, base)], True
            return [export_hf(source, options.folder, options.dtype, options.layout, carry, base)], True
        case "verify-hf":
            from zaya_jax.weights.verify import verify_hf

            return verify_hf(options.folder)
    from zaya_jax.checkpoint import commands

    match options.verb:
        case "verify":
            return commands.verify(options.checkpoint, options.all)
        case "inspect":
            return commands.inspect(options.checkpoint), True
        case "diff":
            lines = list(commands.diff(options.first, options.second))
            return lines or ["The checkpoints are identical."], not lines
        case "prune":
            config = CheckpointConfig(keep=options.keep, keep_every=options.keep_every, keep_best=options.keep_best)
            return [commands.prune(options.run_dir, config, options.quarantined, options.dry_run)], True
    return [commands.rollback(options.run_dir, options.step)], True


def _list_run(path: Path) -> list[str]:
    """Return one line per checkpoint and per quarantined checkpoint of a run, and its status, without jax."""
    run = open_run(path)
    lines = [f"{'step':>9}  {'phase':<14}{'tokens':>16}  {'held-out':>9}  {'size':>10}  notes"]
    lines += [*map(_line, run.checkpoints), *(f"quarantined: {folder.name}" for folder in run.quarantined)]
    if (status := run.status) is not None:
        end = "" if status.exit_status is None else f" with exit status {status.exit_status}"
        message = f": {status.message}" if status.message else ""
        lines.append(f"{status.state}{end} (process {status.pid} on {status.host}, {status.time}){message}")
    return lines


def _line(checkpoint: Checkpoint) -> str:
    if checkpoint.manifest is None:
        return f"{checkpoint.step:>9}  {checkpoint.problem}"
    kinds = {
        "pinned": checkpoint.is_pinned,
        "verified": checkpoint.is_verified,
        "no checksums": not checkpoint.manifest.digests,
        "superseded: never restored": checkpoint.is_superseded,
    }
    notes = ", ".join(note for note, holds in kinds.items() if holds)
    loss = "-" if checkpoint.heldout_loss is None else f"{checkpoint.heldout_loss:.4f}"
    numbers = f"{checkpoint.step:>9}  {checkpoint.phase:<14}{checkpoint.tokens:>16,}  {loss:>9}"
    return f"{numbers}  {size_text(checkpoint.size):>10}  {notes}".rstrip()


if __name__ == "__main__":
    prepare_streams()
    sys.exit(main())
