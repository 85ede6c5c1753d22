"""Explain configuration keys: `python -m zaya_jax.config [SECTION | KEY | WORD]`."""

import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from zaya_jax.config.other_names import TRANSLATED
from zaya_jax.config.reference import Key, generic, keys_by_place, sections, shipped_values
from zaya_jax.errors import InputError, did_you_mean, printable
from zaya_jax.run.command_output import prepare_streams, run_command
from zaya_jax.run.parser import Parser
from zaya_jax.run.table import format_table

_DESCRIPTION = """Print meaning, type, bounds and default of configuration keys: of a section, of a key,
or of all that have each word in their name or meaning. Names that other libraries
use are translated."""
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
    text = " ".join(options.words).partition("=")[0].strip()
    return run_command(lambda: print(*map(printable, explain(text)), sep="\n"))


def _parser() -> Parser:
    parser = Parser(prog="python -m zaya_jax.config", description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.add_argument("words", nargs="*", metavar="WORD", help="section, key or words (default: list the sections)")
    return parser


def explain(text: str) -> list[str]:
    """Return lines about a section, key or word; about all sections without one. InputError if nothing has it."""
    if not text:
        rows = ((each.name or "(the run)", str(len(each.keys)), _first_sentence(each.meaning)) for each in sections())
        table = format_table([("section", "keys", "meaning"), *rows], [False, True, False])
        return [*table, "", "For the keys of a section: python -m zaya_jax.config SECTION"]
    places, name = keys_by_place(), generic(text)
    lines = _describe(places[name]) if name in places else []
    for section in sections():
        if name in (section.name, *section.places):
            lines += textwrap.wrap(section.meaning, _WIDTH)
    if inside := [key for place, key in places.items() if place.startswith(f"{name}.")]:
        return [*lines, "", *_list_keys(inside)]
    if lines:
        return lines
    if text in TRANSLATED:
        return [f"{text} is a name of other libraries. {TRANSLATED[text]}"]
    keys = [key for section in sections() for key in section.keys]
    named = [key for key in keys if text in key.name.split(".")]
    if len(named) == 1:
        return _describe(named[0])
    words = text.lower().split()
    matches = [key for key in keys if all(word in f"{key.name} {key.meaning}".lower() for word in words)]
    if not (matches := named or matches):
        names = [name for key in keys for name in (key.name, key.field.name)]
        raise InputError(f"No key has {text!r} in its name or meaning.{did_you_mean(text, names)}")
    return _list_keys(matches)


def _describe(key: Key) -> list[str]:
    rows = [("type", key.kind), ("default", key.default), *shipped_values(key).items()]
    name = re.escape(key.name).replace("NAME", r"[^.`\s]+")
    # A name of one word is also prose: a page uses it as a key only with these marks.
    use = rf"(?<![\w.]){name}(?![\w.])" if "." in key.name else rf"`{name}[`=:]|^ *{name}: |\s{name}="
    found = (path for path in _DOCS.rglob("*.md") if re.search(use, path.read_text(encoding="utf-8"), re.MULTILINE))
    if pages := sorted(f"docs/{path.relative_to(_DOCS)}" for path in found):
        rows.append(("pages", ", ".join(pages)))
    return [key.name, *textwrap.wrap(key.sentence, _WIDTH), "", *format_table(rows, [False, False]), ""]


def _list_keys(keys: Iterable[Key]) -> list[str]:
    rows = ((key.name, key.default, key.meaning) for key in keys)
    return format_table([("key", "default", "meaning"), *rows], [False, False, False])


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].rstrip(".")


if __name__ == "__main__":
    prepare_streams()
    sys.exit(main())
