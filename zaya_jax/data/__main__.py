"""`python -m zaya_jax.data VERB`: prepare documents, merge the tasks of a preparation, describe a run's data."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from zaya_jax.errors import printable
from zaya_jax.run.command_output import prepare_streams, run_command
from zaya_jax.run.parser import Parser
from zaya_jax.run.typed_name import typed_name


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see `ExitCode`."""
    options = _parser().parse_args(arguments)

    def run() -> None:
        try:
            options.run(options)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("Rerun the command to resume.") from None

    return run_command(run)


def _parser() -> Parser:
    program, plain = "python -m zaya_jax.data", argparse.RawDescriptionHelpFormatter  # keeps examples on one line
    parser = Parser(
        prog=program,
        description="Prepare and inspect training data.",
        epilog=f"example: {program} describe configs/tiny.yaml",
        formatter_class=plain,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    prepare = verbs.add_parser(
        "prepare",
        help="tokenize documents into shards",
        formatter_class=plain,
        description="Tokenize documents into shards. Rerun an interrupted command to resume it.",
        epilog=f"example: {program} prepare --input corpus/*.jsonl.gz --tokenizer tokenizer.json --output data/web",
    )
    prepare.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files and folders: text, .jsonl (.gz, .zst), .parquet, saved Hugging Face datasets, "
        "Megatron .bin with .idx",
    )
    prepare.add_argument(
        "--tokenizer",
        required=True,
        metavar="PATH",
        help="a tokenizer.json of the tokenizers library, or a folder that has one",
    )
    prepare.add_argument(
        "--output",
        required=True,
        type=Path,
        metavar="FOLDER",
        help="new folder, or the folder of an interrupted preparation",
    )
    prepare.add_argument("--chat", action="store_true", help="read conversations (lists of messages) instead of text")
    prepare.add_argument(
        "--field", metavar="NAME", help="JSON key or column to read (default: text, or messages with --chat)"
    )
    prepare.add_argument(
        "--suffixes",
        nargs="+",
        default=[".txt"],
        metavar="SUFFIX",
        help="suffixes of text files; each file is one document (default: .txt)",
    )
    prepare.add_argument(
        "--eot", metavar="TOKEN", help="token that ends a document (default: the tokenizer's, if it has a common one)"
    )
    prepare.add_argument(
        "--bos",
        metavar="TOKEN",
        help="token that begins a document, or 'none' (default: bos_token in tokenizer_config.json "
        "next to the tokenizer)",
    )
    prepare.add_argument(
        "--heldout",
        type=float,
        default=0.01,
        metavar="FRACTION",
        help="fraction of documents to hold out, chosen by a hash of their content (default: 0.01)",
    )
    prepare.add_argument(
        "--max-bad", type=int, default=0, metavar="N", help="maximum number of unusable documents to skip (default: 0)"
    )
    prepare.add_argument("--workers", type=int, metavar="N", help="number of processes (default: one per core)")
    prepare.add_argument("--task", type=int, default=0, metavar="K", help="index of this task, from 0 (default: 0)")
    prepare.add_argument(
        "--of", type=int, default=1, metavar="N", help="number of tasks that share the work (default: 1)"
    )
    prepare.set_defaults(run=_prepare)

    merge = verbs.add_parser(
        "merge",
        help="finish a preparation after all its tasks are done",
        formatter_class=plain,
        description="Finish a preparation with several tasks (--of) after all of them are done.",
        epilog=f"example: {program} merge data/web",
    )
    merge.add_argument("folder", type=Path, metavar="FOLDER", help="the --output folder of prepare")
    merge.set_defaults(run=_merge)

    describe = verbs.add_parser(
        "describe",
        help="report on a run's data",
        formatter_class=plain,
        description="Report on a run's data: sources, phases, padding, storage I/O, samples.",
        epilog=f"example: {program} describe configs/tiny.yaml --samples 2",
    )
    describe.add_argument("config", metavar="CONFIG", help="YAML file of the configuration")
    describe.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="values that override the configuration's"
    )
    describe.add_argument("--png", type=Path, metavar="FILE", help="write a histogram of document lengths to FILE")
    describe.add_argument(
        "--samples", type=int, default=1, metavar="N", help="number of rows to print per phase and source (default: 1)"
    )
    describe.add_argument(
        "--step-seconds",
        type=float,
        default=2.5,
        metavar="S",
        help="seconds per step, to estimate the storage I/O (default: 2.5)",
    )
    describe.add_argument(
        "--max-iops",
        type=float,
        default=70_000,
        metavar="N",
        help="reads per second that the storage sustains (default: 70000)",
    )
    describe.set_defaults(run=_describe)
    return parser


def _prepare(options: argparse.Namespace) -> None:
    from zaya_jax.data.prepare import PrepareSettings, prepare, summary
    from zaya_jax.data.tokenizer import tokenizer_path

    field = options.field or ("messages" if options.chat else "text")
    kind = "chat" if options.chat else "tokens"
    settings = PrepareSettings(kind, field, tuple(options.suffixes), options.eot, options.heldout, options.bos)
    tokenizer = tokenizer_path(options.tokenizer)
    manifest = prepare(
        options.input,
        tokenizer,
        options.output,
        settings,
        max_bad=options.max_bad,
        workers=options.workers,
        task=options.task,
        tasks=options.of,
        isolated=True,
    )
    if manifest is None:
        print(
            printable(
                typed_name(
                    f"Task {options.task} of {options.of} is done. After the last one, run "
                    f"python -m zaya_jax.data merge {options.output}"
                )
            )
        )
    else:
        print(summary(options.output, manifest))


def _merge(options: argparse.Namespace) -> None:
    from zaya_jax.data.prepare import merge, summary

    print(summary(options.folder, merge(options.folder)))


def _describe(options: argparse.Namespace) -> None:
    from zaya_jax.config import load_config
    from zaya_jax.data.describe import describe

    print(
        describe(
            load_config(options.config, options.overrides),
            png=options.png,
            samples=options.samples,
            step_seconds=options.step_seconds,
            max_iops=options.max_iops,
        )
    )


if __name__ == "__main__":
    prepare_streams()
    sys.exit(main())
