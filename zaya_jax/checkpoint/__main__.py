"""`python -m zaya_jax.checkpoint VERB`: look at checkpoints, verify, thin out, average, import and export them."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from zaya_jax.errors import InputError, last_words


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    The exit status is 0, 2 for bad input, 1 where something is damaged or differs, 130 for Ctrl-C.
    """
    given = _parser().parse_args(arguments)
    try:
        return given.run(given)
    except (InputError, KeyboardInterrupt) as error:
        sentence, status = last_words(error)
        print(sentence, file=sys.stderr)
        return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m zaya_jax.checkpoint", description="Checkpoints of runs.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = "RUN_DIR for its newest checkpoint, RUN_DIR@PHASE, or RUN_DIR/checkpoints/STEP"

    add = verbs.add_parser("ls", help="the checkpoints of a run")
    add.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    add.set_defaults(run=_ls)

    add = verbs.add_parser("verify", help="read a checkpoint, or all of a run, and compare it with its digests")
    add.add_argument("checkpoint", metavar="CHECKPOINT", help=one)
    add.add_argument("--all", action="store_true", help="all of the run RUN_DIR")
    add.set_defaults(run=_verify)

    add = verbs.add_parser("inspect", help="its arrays, with their norms, and what it says of itself")
    add.add_argument("checkpoint", metavar="CHECKPOINT", help=one)
    add.set_defaults(run=_inspect)

    add = verbs.add_parser("diff", help="in which arrays and keys two checkpoints differ, and how far")
    add.add_argument("first", metavar="CHECKPOINT", help=one)
    add.add_argument("second", metavar="CHECKPOINT")
    add.set_defaults(run=_diff)

    add = verbs.add_parser("prune", help="remove all checkpoints of a run but those to keep")
    add.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    add.add_argument("--keep", type=int, required=True, metavar="N", help="the newest, at least 1")
    add.add_argument("--keep-every", type=int, metavar="STEPS", help="and those of its multiples")
    add.add_argument("--keep-best", type=int, default=0, metavar="N", help="and those of lowest held-out loss")
    add.add_argument("--quarantined", action="store_true", help="remove what was set aside as damaged or stale, too")
    add.add_argument("--dry-run", action="store_true", help="say what would be removed")
    add.set_defaults(run=_prune)

    add = verbs.add_parser("average", help="several checkpoints into one, which init_from takes")
    add.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help=one)
    add.add_argument("--output", required=True, type=Path, metavar="FOLDER", help="a new run folder")
    add.add_argument("--base", metavar="SOURCE", help="model that the adapters belong to (default: init_from of the "
                     "newest checkpoint's run)")  # fmt: skip
    add.set_defaults(run=_average)

    add = verbs.add_parser("import-hf", help="a folder of transformers as a checkpoint")
    add.add_argument("folder", type=Path, metavar="FOLDER")
    add.add_argument("--output", required=True, type=Path, metavar="RUN_DIR", help="a new run folder")
    add.add_argument("--allow-nonfinite", action="store_true", help="import NaN and infinite values too")
    add.set_defaults(run=_import_hf)

    add = verbs.add_parser("export-hf", help="a checkpoint as a folder that transformers, vLLM and SGLang load")
    add.add_argument("checkpoint", metavar="CHECKPOINT", help=one)
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
        "--base", metavar="SOURCE", help="what adapters are of, if not init_from of their run; hf:FOLDER too"
    )
    add.set_defaults(run=_export_hf)

    add = verbs.add_parser("verify-hf", help="whether the released 8B computes here what it does in transformers")
    add.add_argument("folder", type=Path, metavar="FOLDER")
    add.set_defaults(run=_verify_hf)
    return parser


def _ls(given: argparse.Namespace) -> int:
    from zaya_jax.checkpoint.commands import list_run

    print(list_run(given.run_dir))
    return 0


def _verify(given: argparse.Namespace) -> int:
    from zaya_jax.checkpoint.commands import verify

    text, whole = verify(given.checkpoint, given.all)
    print(text)
    return 0 if whole else 1


def _inspect(given: argparse.Namespace) -> int:
    from zaya_jax.checkpoint.commands import inspect

    for line in inspect(given.checkpoint):
        print(line)
    return 0


def _diff(given: argparse.Namespace) -> int:
    from zaya_jax.checkpoint.commands import diff

    lines = list(diff(given.first, given.second))
    print("\n".join(lines) or "They are equal.")
    return 1 if lines else 0


def _prune(given: argparse.Namespace) -> int:
    from zaya_jax.checkpoint.prune import prune
    from zaya_jax.config import CheckpointConfig

    config = CheckpointConfig(keep=given.keep, keep_every=given.keep_every, keep_best=given.keep_best)
    print(prune(given.run_dir, config, given.quarantined, given.dry_run))
    return 0


def _average(given: argparse.Namespace) -> int:
    from zaya_jax.checkpoint.average import average_checkpoints
    from zaya_jax.run.checkpoints import checkpoint_folder

    folders = [checkpoint_folder(path, "CHECKPOINT") for path in given.checkpoints]
    step = average_checkpoints(folders, given.output, given.base)
    print(f"The average of {len(folders)} checkpoints is {given.output / 'checkpoints' / str(step)}.")
    return 0


def _import_hf(given: argparse.Namespace) -> int:
    from zaya_jax.hf.interop import import_hf

    print(import_hf(given.folder, given.output, given.allow_nonfinite))
    return 0


def _export_hf(given: argparse.Namespace) -> int:
    from zaya_jax.hf.interop import export_hf

    print(export_hf(given.checkpoint, given.folder, given.dtype, given.layout, given.carry, given.base))
    return 0


def _verify_hf(given: argparse.Namespace) -> int:
    from zaya_jax.hf.verify import verify_hf

    print(verify_hf(given.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
