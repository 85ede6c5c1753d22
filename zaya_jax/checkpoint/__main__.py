"""`python -m zaya_jax.checkpoint VERB`: list, verify, compare, prune, average, import, export; roll a run back."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from zaya_jax.errors import ExitCode, InputError, printable
from zaya_jax.run.command_output import prepare_streams, run_command
from zaya_jax.run.parser import Parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see `ExitCode`."""
    options = _parser().parse_args(arguments)
    return run_command(lambda: _run(options))


def _parser() -> Parser:
    program = "python -m zaya_jax.checkpoint"
    plain = argparse.RawDescriptionHelpFormatter  # keeps the example on one line
    parser = Parser(prog=program, description="Manage the checkpoints of runs.",
                                     epilog=f"example: {program} ls runs/tiny", formatter_class=plain)  # fmt: skip
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    run_dir = "folder of the run"
    checkpoint = "RUN_DIR (its newest checkpoint), RUN_DIR@PHASE (the last one of a phase) or RUN_DIR/checkpoints/STEP"

    def add_verb(name: str, what: str, example: str) -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.", formatter_class=plain,
                                epilog=f"example: {program} {name} {example}")  # fmt: skip

    add = add_verb("ls", "list the checkpoints of a run and its status", "runs/tiny")
    add.add_argument("run_dir", type=Path, metavar="RUN_DIR", help=run_dir)

    add = add_verb("verify", "read a checkpoint and compare it with its checksums", "runs/tiny --all")
    add.add_argument("checkpoint", metavar="CHECKPOINT", help=checkpoint)
    add.add_argument("--all", action="store_true", help="verify every checkpoint of the run RUN_DIR")

    add = add_verb("inspect", "print a checkpoint's metadata and the shape and norm of each array", "runs/tiny")
    add.add_argument("checkpoint", metavar="CHECKPOINT", help=checkpoint)

    add = add_verb("diff", "list the arrays and configuration keys that differ between two checkpoints",
                   "runs/tiny/checkpoints/200 runs/tiny/checkpoints/250")  # fmt: skip
    add.add_argument("first", metavar="CHECKPOINT", help=checkpoint)
    add.add_argument("second", metavar="CHECKPOINT", help="checkpoint to compare with")

    add = add_verb("prune", "remove old checkpoints of a run", "runs/tiny --keep 2 --dry-run")
    add.add_argument("run_dir", type=Path, metavar="RUN_DIR", help=run_dir)
    add.add_argument("--keep", type=int, required=True, metavar="N", help="keep the newest N checkpoints (at least 1)")
    add.add_argument("--keep-every", type=int, metavar="STEPS", help="also keep checkpoints at multiples of STEPS")
    add.add_argument("--keep-best", type=int, default=0, metavar="N",
                     help="also keep the N checkpoints with the lowest held-out loss")  # fmt: skip
    add.add_argument("--quarantined", action="store_true", help="also remove quarantined checkpoints")
    add.add_argument("--dry-run", action="store_true", help="print what would be removed, and remove nothing")

    add = add_verb("rollback", "quarantine newer checkpoints, so that a run resumes from an older one", "runs/tiny 200")
    add.add_argument("run_dir", type=Path, metavar="RUN_DIR", help=run_dir)
    add.add_argument("step", type=int, metavar="STEP", help="step of the checkpoint to resume from")

    add = add_verb("average", "average checkpoints into a new one, usable as init_from",
                   "runs/tiny/checkpoints/200 runs/tiny/checkpoints/250 --output runs/average")  # fmt: skip
    add.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help=checkpoint)
    add.add_argument("--output", required=True, type=Path, metavar="RUN_DIR", help="new run folder")
    add.add_argument("--base", metavar="SOURCE", help="base model of the adapters (default: init_from of the newest "
                     "checkpoint's run)")  # fmt: skip

    add = add_verb("import-hf", "convert a transformers folder to a checkpoint",
                   "models/ZAYA1-8B --output runs/zaya1_8b")  # fmt: skip
    add.add_argument("folder", metavar="FOLDER", help="transformers folder: FOLDER or hf:FOLDER")
    add.add_argument("--output", required=True, type=Path, metavar="RUN_DIR", help="new run folder")
    add.add_argument("--allow-nonfinite", action="store_true", help="import NaN and infinite values too")

    add = add_verb("export-hf", "convert a checkpoint to a folder that transformers, vLLM and SGLang load",
                   "runs/tiny exported/tiny --dtype float32")  # fmt: skip
    add.add_argument("checkpoint", metavar="CHECKPOINT", help=f"{checkpoint}, or hf:FOLDER")
    add.add_argument("folder", type=Path, metavar="FOLDER", help="new or empty output folder")
    add.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"],
                     help="dtype of the parameters (default: bfloat16)")  # fmt: skip
    add.add_argument("--layout", default="hf", choices=["hf", "legacy"],
                     help="tensor layout: hf for current transformers, legacy for the first release (default: hf)"
                     )  # fmt: skip
    add.add_argument("--carry", type=Path, metavar="FOLDER",
                     help="folder whose tokenizer and generation files are copied (default: the run's)")  # fmt: skip
    add.add_argument("--base", metavar="SOURCE", help="base model of the adapters (default: init_from of their run)")
    add.add_argument("--peft", action="store_true",
                     help="write adapters as a folder of the peft library instead of merging them")  # fmt: skip

    add = add_verb("verify-hf", "compare logits of the released 8B with those of transformers", "models/ZAYA1-8B")
    add.add_argument("folder", metavar="FOLDER", help="transformers folder: FOLDER or hf:FOLDER")
    return parser


def _run(options: argparse.Namespace) -> ExitCode:
    """Run a verb; each one imports only what it needs, so `ls` works without jax."""
    match options.verb:
        case "ls":
            from zaya_jax.checkpoint.listing import list_run

            print(list_run(options.run_dir))
        case "verify":
            from zaya_jax.checkpoint.commands import verify

            lines, intact = verify(options.checkpoint, options.all)
            print("\n".join(map(printable, lines)))
            return ExitCode.OK if intact else ExitCode.STOPPED
        case "inspect":
            from zaya_jax.checkpoint.commands import inspect

            for line in inspect(options.checkpoint):
                print(printable(line))
        case "diff":
            from zaya_jax.checkpoint.commands import diff

            lines = list(diff(options.first, options.second))
            print("\n".join(map(printable, lines)) or "The checkpoints are identical.")
            return ExitCode.STOPPED if lines else ExitCode.OK
        case "prune":
            from zaya_jax.checkpoint.prune import prune
            from zaya_jax.config import CheckpointConfig

            config = CheckpointConfig(keep=options.keep, keep_every=options.keep_every, keep_best=options.keep_best)
            print(printable(prune(options.run_dir, config, options.quarantined, options.dry_run)))
        case "rollback":
            from zaya_jax.checkpoint.rollback import rollback

            print(printable(rollback(options.run_dir, options.step)))
        case "average":
            from zaya_jax.weights.average import average_checkpoints

            folder = average_checkpoints(options.checkpoints, options.output, options.base)
            print(printable(f"Averaged {len(options.checkpoints)} checkpoints into {folder}."))
        case "import-hf":
            from zaya_jax.weights.interop import import_hf

            print(printable(import_hf(options.folder, options.output, options.allow_nonfinite)))
        case "export-hf":
            from zaya_jax.weights.interop import export_hf, export_peft

            if options.peft and options.layout != "hf":
                raise InputError("--layout legacy cannot be combined with --peft: transformers loads adapters onto the "
                                 "hf layout.")  # fmt: skip
            if options.peft:
                said = export_peft(options.checkpoint, options.folder, options.dtype, options.carry, options.base)
            else:
                said = export_hf(options.checkpoint, options.folder, options.dtype, options.layout, options.carry,
                                 options.base)  # fmt: skip
            print(printable(said))
        case "verify-hf":
            from zaya_jax.weights.verify import verify_hf

            verification = verify_hf(options.folder)
            print(verification)
            return ExitCode.OK if verification.good else ExitCode.STOPPED
    return ExitCode.OK


if __name__ == "__main__":
    prepare_streams()
    sys.exit(main())
