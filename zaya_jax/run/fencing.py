"""Fencing tokens, which stop superseded processes of a run from overwriting their successors' checkpoints.

Processes that start or resume a run take the next token (a number) and record the checkpoints that exist. A checkpoint
is current only if it was saved with the newest token, or existed when a newer token was taken. On disk, in the file
`GENERATION` and in manifests, the token is called `generation`.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from zaya_jax.errors import InputError
from zaya_jax.run.digests import digest
from zaya_jax.run.files import read_json, write_atomically
from zaya_jax.run.signals import warn_once

FENCE = "GENERATION"  # file in a folder of checkpoints
_LEAP = 1000  # more tokens than any run takes without saving a checkpoint


class FencingToken(NamedTuple):
    """The newest token of a checkpoint folder; `accepted` maps steps that existed when it was taken to their tokens."""

    number: int
    accepted: Mapping[int, int]

    def accepts(self, step: int, number: int) -> bool:
        """Return whether the checkpoint of `step`, saved with the token `number`, is current."""
        return number == self.number or self.accepted.get(step) == number


def read_token(folder: Path) -> FencingToken | None:
    """Return the newest token; None if none was taken (as in a copied folder) or, with a warning, if unreadable."""
    path = folder / FENCE
    try:
        tree = read_json(path)
        if digest(_canonical_json(tree["generation"], tree["accepted"]).encode()) != tree["digest"]:
            raise InputError(f"{path} does not match its checksum.")
        token = FencingToken(tree["generation"], {int(step): number for step, number in tree["accepted"].items()})
        return token if all(type(number) is int for number in (token.number, *token.accepted.values())) else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if os.path.lexists(path):
            warn_once(f"Warning: {error if isinstance(error, InputError) else f'{path} is damaged.'} Without it, "
                       "checkpoints that superseded processes saved count as current.")  # fmt: skip
        return None


def take_token(folder: Path, checkpoints: Mapping[int, int]) -> FencingToken:
    """Take the next token; `checkpoints` maps the steps to accept to the tokens that saved them."""
    previous = read_token(folder)
    newest = max(checkpoints.values(), default=0)
    # Only the file knows tokens that have saved nothing yet. If it is lost, skip past them.
    last = max(previous.number, newest) if previous else newest + _LEAP * bool(checkpoints)
    token = FencingToken(last + 1, dict(checkpoints))
    text = _canonical_json(token.number, {str(step): number for step, number in token.accepted.items()})
    write_atomically(folder / FENCE, json.dumps(json.loads(text) | {"digest": digest(text.encode())}) + "\n")
    return token


def is_current(folder: Path, step: int, number: int) -> bool:
    """Return whether the checkpoint of `step` was not saved by a superseded process."""
    token = read_token(folder)
    return token is None or token.accepts(step, number)


def why_superseded(folder: Path, number: int) -> str:
    """Explain why the holder of the token `number` must not write to `folder`; empty if it may."""
    token = read_token(folder)
    if token is None:
        return f"The fencing token of {folder} cannot be read; restart the run."
    if token.number != number:
        return (f"Other processes have resumed this run: its fencing token is now {token.number}, this process has "
                f"{number}.")  # fmt: skip
    return ""


def _canonical_json(generation: int, accepted: Mapping[str, int]) -> str:
    return json.dumps({"generation": generation, "accepted": accepted})
