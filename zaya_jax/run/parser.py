"""The argument parser that all commands share."""

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from zaya_jax.config.other_names import TRANSLATED
from zaya_jax.config.schema import Config
from zaya_jax.errors import did_you_mean, printable
from zaya_jax.run.command_output import output_status
from zaya_jax.run.typed_name import typed_name

_KEYS = {field.name for field in dataclasses.fields(Config)}  # with which overrides begin
_PATHS = {"CHECKPOINT", "CONFIG", "DIR", "FILE", "FOLDER", "PATH", "RUN", "RUN_DIR"}  # metavars


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors suggest the nearest flag or verb, and how to write an override."""

    _typed: Sequence[str] = ()

    def __init__(self, *args: Any, **options: Any) -> None:
        """See `argparse.ArgumentParser`; texts keep their lines, and name commands as they were typed."""
        texts = {key: typed_name(value) for key, value in options.items() if isinstance(value, str)}
        super().__init__(*args, formatter_class=argparse.RawDescriptionHelpFormatter, **options | texts)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """See `argparse.ArgumentParser.parse_known_args`."""
        # What follows `--` is another command's.
        self._typed = list(takewhile("--".__ne__, sys.argv[1:] if args is None else args))
        return super().parse_known_args(args, namespace)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Expand the `~` of a path, which shells leave as it is in quotes and after `=`."""
        is_path = action.type is Path or action.metavar in _PATHS
        return super()._get_value(action, os.path.expanduser(arg_string) if is_path else arg_string)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Exit; with status 1 if the help that was asked for is lost."""
        super().exit(status or output_status(), message)

    def error(self, message: str) -> NoReturn:
        """Print the usage and what is wrong, and exit with status 2."""
        if message.startswith("the following arguments are required"):
            flags = (text.partition("=")[0] for text in self._typed if re.match("--[a-z]", text))
            if unknown := next((flag for flag in flags if not self._flags(flag)), None):
                message += f". {unknown} is unknown.{self._suggest(unknown[2:])}"
        elif unknown := re.match(r"unrecognized arguments: --([^\s=]+)", message):
            message += f".{self._suggest(unknown[1])}"
        elif wrong := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            message += "." + did_you_mean(wrong[1], re.findall(r"[\w-]+", wrong[2]))
        if path := next((text for text in self._typed if text.startswith("-") and os.path.lexists(text)), ""):
            message = f"{message.removesuffix('.')}. A path that begins with - is written ./{path}."
        verb = [*self._used()][:2][-1]  # or this parser, if no verb was typed
        super(Parser, verb).error(printable(message))

    def _suggest(self, flag: str) -> str:
        takes_overrides = any(action.dest == "overrides" for parser in self._used() for action in parser._actions)
        head, *rest = flag.split(".", maxsplit=1)  # the rest can have names with dashes
        key = ".".join([head.replace("-", "_"), *rest])
        if takes_overrides and head.replace("-", "_") in _KEYS:
            return f" An override has no dashes: {key}=VALUE."
        if takes_overrides and (ours := TRANSLATED.get(key)):
            return f" {ours}{' An override is written KEY=VALUE, without dashes.' if ours.startswith('Here') else ''}"
        return did_you_mean(f"--{flag}", self._flags())

    def _flags(self, start: str = "") -> list[str]:
        flags = (text for parser in self._used() for action in parser._actions for text in action.option_strings)
        return [flag for flag in flags if flag.startswith(start)]

    def _used(self) -> Iterator["Parser"]:
        """Yield this parser, and that of the verb that was typed."""
        yield self
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from (action.choices[word] for word in self._typed if word in action.choices)
