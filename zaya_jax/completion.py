"""Shell completion of `zaya`: commands, verbs, flags, files, and configuration keys with their values.

The shell runs `zaya` with the variable `_ARGCOMPLETE`, and argcomplete prints the candidates. Only the parser of the
command that was typed is imported, and never jax: an answer takes a fraction of a second.
"""

import argparse
import importlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

import argcomplete
from argcomplete.completers import FilesCompleter
from argcomplete.lexers import split_line

from zaya_jax.config import load_config, to_dict
from zaya_jax.config.loader import override_keys, value_choices
from zaya_jax.config.shipped import shipped_names
from zaya_jax.errors import InputError

_PARSERS = {"zaya_jax.main": ("zaya_jax.run.options", "training_parser")}


def complete(commands: Mapping[str, tuple[tuple[str, ...], str]]) -> None:
    """Print the candidates that the shell asks for, and exit; `commands` are those of `zaya_jax.__main__`."""
    *_, words, _ = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    module, *verbs = commands[words[1]][0] if words[1:] and words[1] in commands else ("",)
    if module and not verbs:
        os.environ["_ARGCOMPLETE"] = "2"  # the number of words that name the program
        argcomplete.autocomplete(_with_completers(_parser(module)))
    parser = argparse.ArgumentParser()
    names = parser.add_subparsers()
    for name, (_, summary) in commands.items():
        names.add_parser(name, help=summary)
    argcomplete.autocomplete(parser)


def _parser(module: str) -> argparse.ArgumentParser:
    home, function = _PARSERS.get(module, (f"{module}.__main__", "_parser"))
    return getattr(importlib.import_module(home), function)()


def _with_completers(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Attach the completers of configuration files and overrides to a parser and its verbs."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                _with_completers(verb)
        elif action.dest == "config":
            action.completer = _complete_config  # pyright: ignore[reportAttributeAccessIssue]
        elif action.dest == "overrides":
            action.completer = _complete_override  # pyright: ignore[reportAttributeAccessIssue]
    return parser


def _complete_config(prefix: str, parser: argparse.ArgumentParser, **rest: Any) -> list[str]:
    kind = "evals" if parser.prog.endswith(" zaya_jax.evaluate") else "."
    return [*FilesCompleter(("yaml", "yml"))(prefix, parser=parser, **rest), *shipped_names(kind)]


def _complete_override(prefix: str, parsed_args: argparse.Namespace, parser: Any, **rest: Any) -> Iterable[str]:
    keys = dict(override_keys(_typed_config(parsed_args)))
    key, equals, _ = prefix.partition("=")
    if equals:
        return (f"{key}={value}" for value in value_choices(keys.get(key)))
    files = _complete_config(prefix, parser, **rest) if parser.prog.endswith(" zaya_jax.main") else []
    return [*(f"{key}=" for key in keys), *files]


def _typed_config(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration that was typed, for the names in it; {} if there is none or it is invalid."""
    typed = getattr(parsed, "config", None) or getattr(parsed, "overrides", None)
    path = typed[0] if isinstance(typed, list) and typed else typed
    try:
        return to_dict(load_config(path)) if isinstance(path, str) else {}
    except InputError:
        return {}
