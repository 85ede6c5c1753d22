"""The parser of all commands."""

import argparse
import re
from collections.abc import Iterator
from typing import NoReturn

from zaya_jax.errors import did_you_mean


class Parser(argparse.ArgumentParser):
    """An argument parser that suggests the flag that is spelled most like an unknown one."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and what is wrong, and exit with status 2."""
        unknown = re.match(r"unrecognized arguments: --([^\s=]+)(=\S+)?", message)
        if unknown is None:
            super().error(message)
        hint = did_you_mean(f"--{unknown[1]}", self.flags())
        if not hint and unknown[2] and any(action.dest == "overrides" for action in self._actions):
            hint = f" Overrides have no dashes: {unknown[1]}{unknown[2]}."
        super().error(f"{message}.{hint}")

    def flags(self) -> Iterator[str]:
        """Yield the flags of this parser and of its verbs."""
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for verb in action.choices.values():
                    yield from verb.flags()
