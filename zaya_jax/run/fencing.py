"""Fencing tokens: processes of a run that were replaced, and still live, cannot save over their successors.

Processes that start or resume a run take the next token, a number, and record which checkpoints there were. A
checkpoint is current only if it was saved with the newest token, or was there when a newer one was taken. On disk, in
the file `GENERATION` and in manifests, the number is called `generation`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from zaya_jax.run.digests import digest
from zaya_jax.run.files import read_json, write_atomically

_FILE = "GENERATION"
_LEAP = 1000  # more tokens than are taken in a row without a checkpoint


class FencingToken(NamedTuple):
    """The newest token in a folder of checkpoints, and that of each checkpoint there was when it was taken, by step."""

    number: int
    accepted: Mapping[int, int]

    def accepts(self, step: int, number: int) -> bool:
        """Whether the checkpoint of `step`, saved with the token `number`, is current."""
        return number == self.number or self.accepted.get(step) == number


def read_token(folder: Path) -> FencingToken | None:
    """The newest token; None where none was taken, as in a copy of checkpoints, or it cannot be read."""
    try:
        tree = read_json(folder / _FILE)
        if digest(_canonical_json(tree["generation"], tree["accepted"]).encode()) != tree["digest"]:
            return None
        token = FencingToken(tree["generation"], {int(step): number for step, number in tree["accepted"].items()})
        return token if all(type(number) is int for number in (token.number, *token.accepted.values())) else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def take_token(folder: Path, checkpoints: Mapping[int, int]) -> FencingToken:
    """Take the next token; `checkpoints` are those to accept, step → token they were saved with."""
    previous = read_token(folder)
    newest = max(checkpoints.values(), default=0)
    # Tokens with which nothing was saved yet are known by the file alone: where it is gone, they are leapt over.
    last = max(previous.number, newest) if previous else newest + _LEAP * bool(checkpoints)
    token = FencingToken(last + 1, dict(checkpoints))
    text = _canonical_json(token.number, {str(step): number for step, number in token.accepted.items()})
    write_atomically(folder / _FILE, json.dumps(json.loads(text) | {"digest": digest(text.encode())}) + "\n")
    return token


def is_current(folder: Path, step: int, number: int) -> bool:
    """Whether the checkpoint of `step` in `folder`, saved with the token `number`, is of no replaced process."""
    token = read_token(folder)
    return token is None or token.accepts(step, number)


def why_superseded(folder: Path, number: int) -> str:
    """Why the holder of the token `number` may not write to `folder`; empty where it may."""
    token = read_token(folder)
    if token is None:
        return f"The fencing token of {folder} cannot be read: start the run again."
    if token.number != number:
        return f"Other processes have resumed this run: its fencing token is {token.number}, here it is {number}."
    return ""


def _canonical_json(generation: int, accepted: Mapping[str, int]) -> str:
    return json.dumps({"generation": generation, "accepted": accepted})
