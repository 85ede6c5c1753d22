"""Explain configuration keys: `python -m zaya_jax.config [SECTION | KEY | WORD]`."""

import argparse
import itertools
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from zaya_jax.config.other_names import our_name
from zaya_jax.config.reference import Key, find_key, sections, shipped_values
from zaya_jax.errors import ExitCode, InputError, did_you_mean, printable
from zaya_jax.run.command_output import prepare_streams, run_command
from zaya_jax.run.parser import Parser
from zaya_jax.run.table import format_table

_EXAMPLES = """examples:
  python -m zaya_jax.config
  python -m zaya_jax.config optimizer.muon
  python -m zaya_jax.config phases.train.tokens
  python -m zaya_jax.config learning rate"""
_DOCS = Path(__file__).parent.parent.parent / "docs"  # of a clone; a wheel has none
_WIDTH = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what the words name; the exit status is 0, or 2 if no key has them."""
    options = _parser().parse_args(arguments)
    return run_command(lambda: _explain(options.words))


def _parser() -> Parser:
    text = (
        "Print meaning, type, bounds and default of configuration keys: of a section, of a key, or of all that have a "
    )
    text += "word in their name or meaning. Names that other libraries use are translated."
    style = argparse.RawDescriptionHelpFormatter
    description = textwrap.fill(text, 80)
    parser = Parser(prog="python -m zaya_jax.config", description=description, epilog=_EXAMPLES, formatter_class=style)
    parser.add_argument("words", nargs="*", metavar="WORD", help="section, key or words (default: list the sections)")
    return parser


def _explain(words: Sequence[str]) -> int:
    text = " ".join(words).partition("=")[0].strip()
    print(*map(printable, explain(text)), sep="\n")
    return ExitCode.OK


def explain(text: str) -> list[str]:
    """Return lines about a section, key or word; about all sections without one. InputError if nothing has it."""
    by_place = {place: section for section in sections() for place in (section.name, *section.places)}
    if not text:
        rows = ((each.name or "(the run)", str(len(each.keys)), _first_sentence(each.meaning)) for each in sections())
        table = format_table([("section", "keys", "meaning"), *rows], [False, True, False])
        return [*table, "", "For the keys of a section: python -m zaya_jax.config SECTION"]
    section = by_place.get(re.sub(r"^(phases|data\.sources)\.(?!NAME)\w+", r"\1.NAME", text))
    key = find_key(text)
    about_key = [] if key is None else _describe(key)
    if section is not None and section.name:
        return [*about_key, *textwrap.wrap(section.meaning, _WIDTH), "", *_listed(section.keys)]
    if about_key:
        return about_key
    every = list(itertools.chain.from_iterable(each.keys for each in sections()))
    if translated := our_name(text):
        return [f"{text} is a name of other libraries.{translated}"]
    named = [key for key in every if text in key.name.split(".")]
    if len(named) == 1:
        return _describe(named[0])
    matches = [
        key for key in every if all(word.lower() in f"{key.name} {key.meaning}".lower() for word in text.split())
    ]
    if not (matches := named or matches):
        names = {key.name: None for key in every} | {key.name.rpartition(".")[2]: None for key in every}
        raise InputError(f"No key has {text!r} in its name or meaning.{did_you_mean(text, names)}")
    return _listed(matches)


def _describe(key: Key) -> list[str]:
    lines = [key.name, *textwrap.wrap(f"{key.meaning[0].upper()}{key.meaning[1:].rstrip('.')}.", _WIDTH), ""]
    rows = [("type", key.kind), ("default", key.default)]
    rows += [(file, value) for file, value in shipped_values(key).items()]
    name = re.escape(key.name).replace("NAME", r"[^.`\s]+")
    # A name of one word is also prose: a page uses it as a key only with these marks.
    own = rf"(?<![\w.]){name}(?![\w.])" if "." in key.name else rf"`{name}[`=:]|^ *{name}: |\s{name}="
    pages = [
        f"docs/{path.relative_to(_DOCS)}"
        for path in sorted(_DOCS.rglob("*.md"))
        if re.search(own, path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    rows += [("pages", ", ".join(pages))] if pages else []
    return [*lines, *format_table(rows, [False, False]), ""]


def _listed(keys: Sequence[Key]) -> list[str]:
    rows = ((key.name, key.default, key.meaning) for key in keys)
    return format_table([("key", "default", "meaning"), *rows], [False, False, False])


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].rstrip(".")


if __name__ == "__main__":
    prepare_streams()
    sys.exit(main())
