"""`python -m zaya_jax.checkpoint VERB`: list, verify, compare, remove, average, import and export checkpoints."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from zaya_jax.errors import ExitCode, InputError, last_words


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status, see `ExitCode`."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except (InputError, KeyboardInterrupt) as error:
        sentence, status = last_words(error)
        print(sentence, file=sys.stderr)
        return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m zaya_jax.checkpoint", description="Checkpoints of runs.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    checkpoint = "RUN_DIR for its newest checkpoint, RUN_DIR@PHASE, or RUN_DIR/checkpoints/STEP"

    add = verbs.add_parser("ls", help="list the checkpoints of a run and its status")
    add.add_argument("run_dir", type=Path, metavar="RUN_DIR")

    add = verbs.add_parser("verify", help="read a checkpoint, or all of a run, and compare its checksums")
    add.add_argument("checkpoint", metavar="CHECKPOINT", help=checkpoint)
    add.add_argument("--all", action="store_true", help="verify all checkpoints of the run RUN_DIR")

    add = verbs.add_parser("inspect", help="list the arrays of a checkpoint, with their norms, and its metadata")
    add.add_argument("checkpoint", metavar="CHECKPOINT", help=checkpoint)

    add = verbs.add_parser("diff", help="list the arrays and configuration keys in which two checkpoints differ")
    add.add_argument("first", metavar="CHECKPOINT", help=checkpoint)
    add.add_argument("second", metavar="CHECKPOINT")

    add = verbs.add_parser("prune", help="remove checkpoints of a run")
    add.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    add.add_argument("--keep", type=int, required=True, metavar="N", help="keep the newest N, at least 1")
    add.add_argument("--keep-every", type=int, metavar="STEPS", help="also keep those of every multiple of STEPS")
    add.add_argument("--keep-best", type=int, default=0, metavar="N", help="also keep the N of lowest held-out loss")
    add.add_argument("--quarantined", action="store_true", help="also remove quarantined checkpoints")
    add.add_argument("--dry-run", action="store_true", help="only print what would be removed")

    add = verbs.add_parser("average", help="average checkpoints into one that init_from takes")
    add.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help=checkpoint)
    add.add_argument("--output", required=True, type=Path, metavar="FOLDER", help="a new run folder")
    add.add_argument("--base", metavar="SOURCE", help="model that the adapters belong to (default: init_from of the "
                     "newest checkpoint's run)")  # fmt: skip

    add = verbs.add_parser("import-hf", help="convert a transformers folder to a checkpoint")
    add.add_argument("folder", metavar="FOLDER", help="FOLDER or hf:FOLDER")
    add.add_argument("--output", required=True, type=Path, metavar="RUN_DIR", help="a new run folder")
    add.add_argument("--allow-nonfinite", action="store_true", help="import NaN and infinite values too")

    add = verbs.add_parser("export-hf", help="convert a checkpoint to a folder that transformers, vLLM and SGLang load")
    add.add_argument("checkpoint", metavar="CHECKPOINT", help=f"{checkpoint}, or hf:FOLDER")
    add.add_argument("folder", type=Path, metavar="FOLDER", help="new, or empty")
    add.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"],
                     help="of the parameters (default: bfloat16)")  # fmt: skip
    add.add_argument("--layout", default="hf", choices=["hf", "legacy"], help="names and nesting (default: hf)")
    add.add_argument(
        "--carry",
        type=Path,
        metavar="FOLDER",
        help="folder whose tokenizer and generation files are exported, too (default: that of the run)",
    )
    add.add_argument(
        "--base", metavar="SOURCE", help="model that the adapters belong to (default: init_from of their run)"
    )

    add = verbs.add_parser("verify-hf", help="compare the released 8B here with transformers")
    add.add_argument("folder", metavar="FOLDER", help="FOLDER or hf:FOLDER")
    return parser


def _run(options: argparse.Namespace) -> ExitCode:
    """Each verb imports what it needs: `ls` works without jax."""
    match options.verb:
        case "ls":
            from zaya_jax.checkpoint.listing import list_run

            print(list_run(options.run_dir))
        case "verify":
            from zaya_jax.checkpoint.commands import verify

            text, intact = verify(options.checkpoint, options.all)
            print(text)
            return ExitCode.OK if intact else ExitCode.STOPPED
        case "inspect":
            from zaya_jax.checkpoint.commands import inspect

            for line in inspect(options.checkpoint):
                print(line)
        case "diff":
            from zaya_jax.checkpoint.commands import diff

            lines = list(diff(options.first, options.second))
            print("\n".join(lines) or "They are equal.")
            return ExitCode.STOPPED if lines else ExitCode.OK
        case "prune":
            from zaya_jax.checkpoint.prune import prune
            from zaya_jax.config import CheckpointConfig

            config = CheckpointConfig(keep=options.keep, keep_every=options.keep_every, keep_best=options.keep_best)
            print(prune(options.run_dir, config, options.quarantined, options.dry_run))
        case "average":
            from zaya_jax.weights.average import average_checkpoints

            folder = average_checkpoints(options.checkpoints, options.output, options.base)
            print(f"Averaged {len(options.checkpoints)} checkpoints into {folder}.")
        case "import-hf":
            from zaya_jax.weights.interop import import_hf

            print(import_hf(options.folder, options.output, options.allow_nonfinite))
        case "export-hf":
            from zaya_jax.weights.interop import export_hf

            print(export_hf(options.checkpoint, options.folder, options.dtype, options.layout, options.carry,
                            options.base))  # fmt: skip
        case "verify-hf":
            from zaya_jax.weights.verify import verify_hf

            print(verify_hf(options.folder))
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
