"""`python -m zaya_jax.data VERB`: prepare documents, merge tasks of a preparation, train a tokenizer, describe data."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from zaya_jax.errors import printable
from zaya_jax.run.command_output import prepare_streams, run_command
from zaya_jax.run.parser import Parser
from zaya_jax.run.typed_name import typed_name

_PROGRAM = "python -m zaya_jax.data"
_FIELD = "JSON key or column to read (default: text, or messages with --chat)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see `ExitCode`."""
    options = _parser().parse_args(arguments)

    def run() -> None:
        try:
            options.run(options)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("Rerun the command to resume." if options.verb == "prepare" else "") from None

    return run_command(run)


def _parser() -> Parser:
    example = f"example: {_PROGRAM} "
    summary = "Prepare and inspect training data."
    parser = Parser(prog=_PROGRAM, description=summary, epilog=f"{example}describe configs/tiny.yaml")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(run: Callable[[argparse.Namespace], None], name: str, summary: str, arguments: str) -> Callable:
        """Add a verb with an example of its arguments, and return a function that adds one."""
        texts = {"help": summary, "description": run.__doc__, "epilog": f"{example}{name} {arguments}"}
        added = verbs.add_parser(name, **texts)
        added.set_defaults(run=run)
        return lambda argument, text, **settings: added.add_argument(argument, help=text, **settings)

    arguments = "--input corpus/*.jsonl.gz --tokenizer tokenizer.json --output data/web"
    add = verb(_prepare, "prepare", "tokenize documents into shards", arguments)
    _add_inputs(add)
    add("--field", _FIELD, metavar="NAME")
    text = "a tokenizer.json of the tokenizers library, or a folder that has one"
    add("--tokenizer", text, required=True, metavar="PATH")
    text = "new folder, or the folder of an interrupted preparation"
    add("--output", text, required=True, type=Path, metavar="FOLDER")
    add("--eot", "token that ends a document (default: the tokenizer's, if it has a common one)", metavar="TOKEN")
    default = "bos_token in tokenizer_config.json next to the tokenizer"
    add("--bos", f"token that begins a document, or 'none' (default: {default})", metavar="TOKEN")
    text = "fraction of documents to hold out, chosen by a hash of their content (default: 0.01)"
    add("--heldout", text, type=float, default=0.01, metavar="FRACTION")
    add("--workers", "number of processes (default: one per core)", type=int, metavar="N")
    add("--task", "index of this task, from 0 (default: 0)", type=int, default=0, metavar="K")
    add("--of", "number of tasks that share the work (default: 1)", type=int, default=1, metavar="N")

    arguments = "--input corpus/*.jsonl.gz --vocab-size 32768 --output tokenizer"
    add = verb(_train_tokenizer, "tokenizer", "train a tokenizer", arguments)
    _add_inputs(add)
    add("--field", f"{_FIELD}, or one for each --input", nargs="+", metavar="NAME")
    add("--output", "new folder", required=True, type=Path, metavar="FOLDER")
    add("--vocab-size", "number of tokens (default: 32768)", type=int, default=32_768, metavar="N")
    default = ["<|im_start|>", "<|im_end|>"]
    text = f"special tokens besides <|endoftext|> (default: {' '.join(default)}, of the built-in chat template)"
    add("--special", text, nargs="*", default=default, metavar="TOKEN")
    text = "bytes of input to train on; of a larger one, a part of each source (default: 1000000000)"
    add("--bytes", text, type=int, default=10**9, metavar="N")

    add = verb(_merge, "merge", "finish a preparation after all its tasks are done", "data/web")
    add("folder", "the --output folder of prepare", type=Path, metavar="FOLDER")

    add = verb(_describe, "describe", "report on a run's data", "configs/tiny.yaml --samples 2")
    add("config", "YAML file of the configuration", metavar="CONFIG")
    add("overrides", "values that override the configuration's", nargs="*", metavar="section.key=value")
    add("--samples", "number of rows to print per phase and source (default: 1)", type=int, default=1, metavar="N")
    return parser


def _add_inputs(add: Callable) -> None:
    kinds = "text, .jsonl (.gz, .zst), .csv, .parquet, saved Hugging Face datasets, Megatron .bin with .idx"
    add("--input", f"files and folders: {kinds}", nargs="+", required=True, metavar="PATH")
    add("--chat", "read conversations (lists of messages, or questions with answers)", action="store_true")
    text = "suffixes of text files; each file is one document (default: .txt)"
    add("--suffixes", text, nargs="+", default=[".txt"], metavar="SUFFIX")
    add("--max-bad", "maximum number of unusable documents to skip (default: 0)", type=int, default=0, metavar="N")


def _prepare(options: argparse.Namespace) -> None:
    """Tokenize documents into shards. Rerun an interrupted command to resume it."""
    from zaya_jax.data.prepare.preparation import PrepareSettings, prepare, summary
    from zaya_jax.data.tokenizer import tokenizer_path

    kind, field = ("chat", "messages") if options.chat else ("tokens", "text")
    suffixes = tuple(options.suffixes)
    settings = PrepareSettings(kind, options.field or field, suffixes, options.eot, options.heldout, options.bos)
    limits = {"max_bad": options.max_bad, "workers": options.workers, "task": options.task, "tasks": options.of}
    manifest = prepare(
        options.input, tokenizer_path(options.tokenizer), options.output, settings, **limits, isolated=True
    )
    if manifest is None:
        done = f"Task {options.task} of {options.of} is done. After the last one, run {_PROGRAM} merge {options.output}"
        print(printable(typed_name(done)))
    else:
        print(summary(options.output, manifest))


def _train_tokenizer(options: argparse.Namespace) -> None:
    """Train a byte-level BPE tokenizer, and measure its compression of each source on other documents."""
    from zaya_jax.data.prepare.tokenizer_training import TrainingTexts, train_on

    fields = options.field or ["messages" if options.chat else "text"]
    texts = TrainingTexts(options.input, fields, tuple(options.suffixes), options.bytes, options.max_bad)
    print(train_on(texts, options.output, options.vocab_size, options.special))


def _merge(options: argparse.Namespace) -> None:
    """Finish a preparation with several tasks (--of) after all of them are done."""
    from zaya_jax.data.prepare.preparation import merge, summary

    print(summary(options.folder, merge(options.folder)))


def _describe(options: argparse.Namespace) -> None:
    """Report on a run's data: sources, phases, padding, document lengths, samples."""
    from zaya_jax.config import load_config
    from zaya_jax.data.describe import describe

    config = load_config(options.config, options.overrides)
    print(describe(config, options.samples))


if __name__ == "__main__":
    prepare_streams()
    sys.exit(main())
