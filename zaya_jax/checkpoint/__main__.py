"""`python -m zaya_jax.checkpoint VERB`: list, verify, compare, prune, average, import, export; roll a run back."""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
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


def _parser() -> Parser:
    program = "python -m zaya_jax.checkpoint"
    what, example = "Manage the checkpoints of runs.", f"example: {program} ls runs/tiny"
    parser = Parser(prog=program, description=what, epilog=example)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def add(name: str, what: str, example: str) -> Callable[..., Any]:
        about, epilog = f"{what[0].upper()}{what[1:]}.", f"example: {program} {name} {example}"
        return verbs.add_parser(name, help=what, description=about, epilog=epilog).add_argument

    run_dir: dict[str, Any] = {"help": "folder of the run", "metavar": "RUN_DIR", "type": Path}
    checkpoint = {"help": _NAME, "metavar": "CHECKPOINT"}
    output: dict[str, Any] = {"help": "new run folder", "metavar": "RUN_DIR", "required": True, "type": Path}
    pair = "runs/tiny/checkpoints/200 runs/tiny/checkpoints/250"
    add("ls", "list the checkpoints of a run and its status", "runs/tiny")("run_dir", **run_dir)
    flag = add("verify", "read a checkpoint and compare it with its checksums", "runs/tiny --all")
    flag("checkpoint", **checkpoint)
    flag("--all", help="verify every checkpoint of the run RUN_DIR", action="store_true")
    what = "print a checkpoint's metadata and the shape and norm of each array"
    add("inspect", what, "runs/tiny")("checkpoint", **checkpoint)
    flag = add("diff", "list the arrays and configuration keys that differ between two checkpoints", pair)
    flag("first", **checkpoint)
    flag("second", help="checkpoint to compare with", metavar="CHECKPOINT")
    flag = add("prune", "remove old checkpoints of a run", "runs/tiny --keep 2 --dry-run")
    flag("run_dir", **run_dir)
    flag("--keep", help="keep the newest N checkpoints (at least 1)", metavar="N", type=int, required=True)
    flag("--keep-every", help="also keep checkpoints at multiples of STEPS", metavar="STEPS", type=int)
    best = "also keep the N checkpoints with the lowest held-out loss"
    flag("--keep-best", help=best, metavar="N", type=int, default=0)
    flag("--dry-run", help="print what would be removed, and remove nothing", action="store_true")
    flag = add("rollback", "quarantine newer checkpoints, so that a run resumes from an older one", "runs/tiny 200")
    flag("run_dir", **run_dir)
    flag("step", help="step of the checkpoint to resume from", metavar="STEP", type=int)
    flag = add("average", "average checkpoints into a new one, usable as init_from", f"{pair} --output runs/average")
    flag("checkpoints", **checkpoint, nargs="+")
    flag("--output", **output)
    _add_hf(add, output)
    return parser


def _add_hf(add: Callable[..., Callable[..., Any]], output: dict[str, Any]) -> None:
    hf_folder = {"help": "transformers folder: FOLDER or hf:FOLDER", "metavar": "FOLDER"}
    what, example = "convert a transformers folder to a checkpoint", "models/ZAYA1-8B --output runs/zaya1_8b"
    flag = add("import-hf", what, example)
    flag("folder", **hf_folder)
    flag("--output", **output)
    flag("--allow-nonfinite", help="import NaN and infinite values too", action="store_true")
    what = "convert a checkpoint to a folder that transformers, vLLM and SGLang load"
    flag = add("export-hf", what, "runs/tiny exported/tiny --dtype float32")
    flag("checkpoint", help=f"{_NAME}, or hf:FOLDER", metavar="CHECKPOINT")
    flag("folder", help="new or empty output folder", metavar="FOLDER", type=Path)
    flag("--dtype", help="dtype of the parameters (default: bfloat16)", default="bfloat16", choices=_DTYPES)
    layout = "tensor layout: hf for current transformers, legacy for the first release (default: hf)"
    flag("--layout", help=layout, default="hf", choices=["hf", "legacy"])
    carry = "folder whose tokenizer and generation files are copied (default: the run's)"
    flag("--carry", help=carry, metavar="FOLDER", type=Path)
    flag("--base", help="base model of the adapters (default: init_from of their run)", metavar="SOURCE")
    flag("--peft", help="write adapters as a folder of the peft library instead of merging them", action="store_true")
    what = "compare logits of the released 8B with those of transformers"
    add("verify-hf", what, "models/ZAYA1-8B")("folder", **hf_folder)


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

            folder = average_checkpoints(options.checkpoints, options.output)
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
            return [commands.prune(options.run_dir, config, options.dry_run)], True
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
