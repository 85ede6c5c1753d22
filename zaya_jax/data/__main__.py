"""`python -m zaya_jax.data VERB`: prepare documents, merge what several tasks prepared, describe what a run reads."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from zaya_jax.errors import InputError, RunStopped, is_disk_full, last_words


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0, 2 for bad input, 1 for work that had to stop, 130 for Ctrl-C."""
    given = _parser().parse_args(arguments)
    try:
        given.run(given)
    except InputError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except RunStopped as error:
        print(f"Stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted: rerun the command to resume.", file=sys.stderr)
        return 130
    except OSError as error:
        if not is_disk_full(error):
            raise
        sentence, status = last_words(error)
        print(sentence, file=sys.stderr)
        return status
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m zaya_jax.data", description="Prepare and look at training data.")
    verbs = parser.add_subparsers(dest="verb", required=True)

    prepare = verbs.add_parser("prepare", help="documents to token shards; the same command goes on after a kill")
    prepare.add_argument("--input", nargs="+", required=True, metavar="PATH",
                         help="files and folders: text, .jsonl (.gz, .zst), .parquet, saved Hugging Face datasets, "
                              "Megatron .bin with .idx")  # fmt: skip
    prepare.add_argument("--tokenizer", required=True, type=Path, metavar="FILE", help="any tokenizer.json")
    prepare.add_argument("--output", required=True, type=Path, metavar="FOLDER", help="new, or of an unfinished call")
    prepare.add_argument("--chat", action="store_true", help="the field holds conversations: lists of messages")
    prepare.add_argument("--field", metavar="NAME", help="key or column (default: text, with --chat messages)")
    prepare.add_argument("--suffixes", nargs="+", default=[".txt"], metavar="END",
                         help="endings of files that are text, one document each (default: .txt)")  # fmt: skip
    prepare.add_argument("--eot", metavar="TOKEN", help="the token that ends a document, where it is not a known one")
    prepare.add_argument("--bos", metavar="TOKEN", help="the token that begins a document, or none (default: as "
                         "tokenizer_config.json beside the tokenizer says)")  # fmt: skip
    prepare.add_argument("--heldout", type=float, default=0.01, metavar="PART",
                         help="part of the documents held out, by a hash of their content (default: 0.01)")  # fmt: skip
    prepare.add_argument("--max-bad", type=int, default=0, metavar="N",
                         help="documents that cannot be used and may be left out (default: 0)")  # fmt: skip
    prepare.add_argument("--workers", type=int, metavar="N", help="processes (default: one for each core)")
    prepare.add_argument("--task", type=int, default=0, metavar="K", help="of this call, from 0 (default: 0)")
    prepare.add_argument("--of", type=int, default=1, metavar="N", help="calls that share the work (default: 1)")
    prepare.set_defaults(run=_prepare)

    merge = verbs.add_parser("merge", help="finish a folder whose tasks are all done")
    merge.add_argument("folder", type=Path, help="the --output of prepare")
    merge.set_defaults(run=_merge)

    describe = verbs.add_parser("describe", help="what a configured run reads: sources, phases, padding, samples")
    describe.add_argument("config", metavar="CONFIG", help="a configuration")
    describe.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that override the file's")
    describe.add_argument("--png", type=Path, metavar="FILE", help="write a histogram of document lengths to FILE")
    describe.add_argument("--samples", type=int, default=1, metavar="N", help="rows shown of each source (default: 1)")
    describe.add_argument("--step-seconds", type=float, default=2.5, metavar="S",
                          help="length of a step, for the load on storage (default: 2.5)")  # fmt: skip
    describe.add_argument("--max-iops", type=float, default=70_000, metavar="N",
                          help="reads a second that the storage can do (default: 70000)")  # fmt: skip
    describe.set_defaults(run=_describe)
    return parser


def _prepare(given: argparse.Namespace) -> None:
    from zaya_jax.data.prepare import PrepareSettings, prepare, summary

    field = given.field or ("messages" if given.chat else "text")
    kind = "chat" if given.chat else "tokens"
    settings = PrepareSettings(kind, field, tuple(given.suffixes), given.eot, given.heldout,
                               given.bos)  # fmt: skip
    manifest = prepare(given.input, given.tokenizer, given.output, settings, max_bad=given.max_bad,
                       workers=given.workers, task=given.task, tasks=given.of)  # fmt: skip
    if manifest is None:
        print(f"Task {given.task} of {given.of} is done. When all are: python -m zaya_jax.data merge {given.output}")
    else:
        print(summary(given.output, manifest))


def _merge(given: argparse.Namespace) -> None:
    from zaya_jax.data.prepare import merge, summary

    print(summary(given.folder, merge(given.folder)))


def _describe(given: argparse.Namespace) -> None:
    from zaya_jax.config import load_config
    from zaya_jax.data.describe import describe

    print(describe(load_config(given.config, given.overrides), png=given.png, samples=given.samples,
                   step_seconds=given.step_seconds, max_iops=given.max_iops))  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
