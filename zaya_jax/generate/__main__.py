"""`python -m zaya_jax.generate PATH`: print continuations of prompts, or chat with a model."""

import argparse
import collections
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from zaya_jax.config.checks import require
from zaya_jax.errors import InputError
from zaya_jax.hardware.environment import keep_compilations
from zaya_jax.run.command_output import Unescaped, is_output_read, prepare_streams, run_command, undecoded
from zaya_jax.run.files import read_text
from zaya_jax.run.options import MODEL_PATH
from zaya_jax.run.parser import Parser

_EXAMPLES = """examples:
  python -m zaya_jax.generate runs/tiny --prompt "def main"
  python -m zaya_jax.generate runs/tiny@train --prompt "import os" --samples 3 --max-new-tokens 64
  echo "def main" | python -m zaya_jax.generate runs/tiny -
  python -m zaya_jax.generate exported/ --message "Prove that 2 is prime." --rsa 16 4 2 4096 --max-new-tokens 8192
  python -m zaya_jax.generate exported/ --chat --temperature 0.6 --top-p 0.95
  python -m zaya_jax.generate exported/ --file book.txt --samples 4 --data 4 --context 2   # on eight devices"""
Encode = Callable[[str], list[int]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see `ExitCode`."""
    options = _parser().parse_args(arguments)
    return run_command(lambda: _run(options))


_SAMPLING = {
    "temperature": "0 takes the most likely token",
    "top-k": "keep the K most likely tokens",
    "top-p": "keep the most likely tokens with this probability together",
    "min-p": "keep tokens at least this many times as likely as the most likely",
    "repetition-penalty": "divide logits of tokens that occurred",
}


def _parser() -> Parser:
    description = "Continue texts with a model, or chat with it."
    parser = Parser(prog="python -m zaya_jax.generate", description=description, epilog=_EXAMPLES)
    flag, texts = parser.add_argument, {"action": "append", "default": [], "metavar": "TEXT"}

    def number(name: str, default: int, text: str) -> None:
        flag(name, type=int, default=default, metavar="N", help=f"{text} (default: {default})")

    flag("path", metavar="PATH", help=MODEL_PATH)
    flag("stdin", nargs="?", metavar="-", help="read one prompt from standard input")
    flag("--prompt", help="text to continue; can be given several times", **texts)
    flag("--message", help="message to answer, through the chat template; can be given several times", **texts)
    flag("--file", metavar="FILE", help="file with one prompt")
    flag("--chat", action="store_true", help="hold a conversation in the terminal; /help lists its commands")
    flag("--system", metavar="TEXT", help="system message (with --chat or --message)")
    number("--max-new-tokens", 256, "largest number of new tokens")
    number("--samples", 1, "continuations of each prompt")
    number("--seed", 0, "seed of the first continuation")
    flag("--stop", help="end a continuation before this text", **texts)
    written = "each written from the last TAIL tokens of C of them; prints the last round's first"
    text = f"Markovian RSA: N candidates, then T rounds of N more, {written}"
    flag("--rsa", nargs=4, type=int, metavar=("N", "C", "T", "TAIL"), help=text)
    flag("--logprobs", action="store_true", help="print each new token with its log-probability instead of text")
    text = "dtype to compute in (default: bfloat16 on GPUs, float32 on CPUs)"
    flag("--dtype", choices=("float32", "bfloat16"), help=text)
    flag("--tokenizer", metavar="FOLDER", help="tokenizer to use in place of the model's own")
    number("--data", 1, "devices to split the continuations over")
    number("--context", 1, "devices to split the cache of each continuation over")
    for name, text in _SAMPLING.items():
        default = "that of generation_config.json" + (", else 0.8" if name == "temperature" else "")
        kind = int if name == "top-k" else float
        flag(f"--{name}", type=kind, metavar="X", help=f"{text} (default: {default})")
    return parser


def _run(options: argparse.Namespace) -> None:
    prompts = _prompts(options)
    if not sys.stdout.isatty():  # a file or program gets the text as the model wrote it
        sys.stdout = Unescaped(sys.stdout)
    require(options.samples >= 1, "--samples", options.samples, "at least 1")
    keep_compilations()
    from zaya_jax.config import ParallelConfig
    from zaya_jax.generate.source import open_text_model
    from zaya_jax.model.zaya import unrolled

    layout = ParallelConfig(data=options.data, context=options.context)
    opened = open_text_model(options.path, options.dtype, options.tokenizer, layout)
    flags = {name: value for name in opened.sampling._fields if (value := getattr(options, name)) is not None}
    opened = opened._replace(model=unrolled(opened.model), sampling=opened.sampling._replace(**flags))
    opened.sampling.check("--")
    from zaya_jax.generate.chat import Chat
    from zaya_jax.generate.terminal import converse
    from zaya_jax.generate.text import encode_prompt

    encode: Encode = functools.partial(encode_prompt, opened.tokenizer)
    if options.chat or options.message:
        chat = Chat(opened, opened.sampling, options.max_new_tokens, options.seed, options.system)
        encode, options.stop = chat.prompt, [*options.stop, *chat.stop]
        if options.chat:
            return converse(chat)
    if options.rsa is not None:
        return _rsa(options, opened, prompts, encode)
    return _continue(options, opened, [prompt for prompt in prompts for _ in range(options.samples)], encode)


def _prompts(options: argparse.Namespace) -> list[str]:
    sources = (options.prompt, options.message, options.file is not None, options.stdin, options.chat)
    if sum(map(bool, sources)) != 1:
        ways = "what to continue with --prompt TEXT, --file FILE or -, or what to answer with --message TEXT or --chat"
        raise InputError(f"Name {ways}: exactly one of them.")
    if options.stdin not in (None, "-"):
        advice = f"To continue this text, use --prompt {options.stdin!r}; to read standard input, use -."
        raise InputError(f"The argument {options.stdin!r} is unexpected. {advice}")
    if options.system is not None and not (options.chat or options.message):
        raise InputError("--system is only for --chat and --message: add one, or remove --system.")
    if options.rsa is not None and (options.chat or options.samples > 1 or options.logprobs):
        raise InputError("--rsa does not go with --chat, --samples or --logprobs: remove one.")
    if options.file is not None:
        return [read_text(options.file, "--file")]
    if options.stdin is not None:
        text = sys.stdin.read()
        if wrong := undecoded(text):
            raise InputError(f"Standard input is not {sys.stdin.encoding}: byte {wrong} cannot be read.")
        return [text]
    return options.prompt or options.message


def _continue(options: argparse.Namespace, opened: Any, prompts: list[str], encode: Encode) -> None:
    from zaya_jax.generate.decode import reserve_slots
    from zaya_jax.run.progress import show_status
    from zaya_jax.run.table import size_text

    shown = [""] * len(prompts) if options.message else prompts
    alone, printed, rows = len(prompts) == 1 and not options.logprobs, 0, []
    seeds, encoded = range(options.seed, options.seed + len(prompts)), list(map(encode, prompts))
    engine = opened.make_engine()
    reserve_slots(engine, encoded, options.max_new_tokens)
    blocks = opened.stream(engine, encoded, options.max_new_tokens, seeds=seeds, stop=options.stop)
    with show_status(f"generating the first tokens; the cache takes {size_text(engine.cache_bytes)} on a device"):
        first = next(blocks)
    for rows in itertools.chain([first], blocks):
        if not is_output_read():
            return
        if alone:
            text = shown[0] + rows[0].text
            print(text[printed:], end="", flush=True)
            printed = len(text)
    if alone:
        print()
        return
    for prompt, start, row in zip(prompts, shown, rows, strict=True):
        print(f"=== {prompt!r}")
        if not options.logprobs:
            print(start + row.text)
            continue
        for token, logprob in zip(row.tokens, row.logprobs, strict=True):
            print(f"{logprob:9.4f}  {opened.tokenizer.decode([token])!r}")


def _rsa(options: argparse.Namespace, opened: Any, prompts: list[str], encode: Encode) -> None:
    from zaya_jax.generate.rsa import MarkovianRSA, aggregate_recursively

    settings = MarkovianRSA(*options.rsa)
    settings.check("--rsa ")
    finished, engine = list[str](), opened.make_engine()

    def write(texts: Sequence[str], seeds: Sequence[int]) -> list[list[int]]:
        encoded = [encode(text) for text in texts]
        blocks = opened.stream(engine, encoded, options.max_new_tokens, seeds=seeds, stop=options.stop)
        rows = collections.deque(blocks, maxlen=1).pop()
        finished.extend(row.text for row in rows)
        print(f"{len(finished)} candidates", file=sys.stderr)
        return [opened.tokenizer.encode(row.text) for row in rows]  # without what ended it, which may end a turn

    for prompt in prompts:
        aggregate_recursively(write, opened.tokenizer, prompt, settings, options.seed)
        print(finished[-settings.candidates])


if __name__ == "__main__":
    prepare_streams()
    sys.exit(main())
