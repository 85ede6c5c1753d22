"""What tests of measurements share."""

import re
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from zaya_jax.train.program import PhaseProgram


class Program(SimpleNamespace):
    """What a compiled program is to a benchmark: `run`, and 42 bytes of memory."""

    def __call__(self, *arguments):
        return self.run(*arguments)

    def memory_analysis(self):
        return SimpleNamespace(argument_size_in_bytes=30, output_size_in_bytes=20, alias_size_in_bytes=15,
                               temp_size_in_bytes=7)  # fmt: skip

    def as_text(self):
        return self.text


def share_states(patch: pytest.MonkeyPatch) -> None:
    """Let the programs of a search share the abstract state of one shape and layout, which is traced."""
    find, states = PhaseProgram.__dict__["abstract_state"].func, {}

    def shared(program):
        key = program.config.model, program.placement.mesh, program.placement.config, program.config.optimizer
        if key not in states:
            states[key] = find(program)
        return states[key]

    patch.setattr(PhaseProgram, "abstract_state", property(shared))


def empty_state(program: PhaseProgram) -> Any:
    """A state that takes as much as one that is drawn, and need not be compiled."""

    def empty(x: jax.ShapeDtypeStruct) -> Any:
        typed_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key(0) if typed_key else np.zeros(x.shape, x.dtype)

    return jax.tree.map(empty, program.abstract_state)


_NUMBER = r"\s+([\d.]+(?:e[+-]\d+)?)"
_HALF = _NUMBER * 3 + r"\s+(\d+(?:\.\d+)?(?:e\+\d+)?|N/A)"
_ROW = re.compile(rf"\s*(\d+)\s+(\d+)\s+(\w+)\s+(\w+)\s+(-?\d+)(?:{_HALF}| {{32}}){_HALF}")
_FIELDS = ("size", "count", "type", "redop", "root", "time", "algbw", "busbw", "wrong", "time_in_place",
           "algbw_in_place", "busbw_in_place", "wrong_in_place")  # fmt: skip


def parse_rows(text: str) -> list[dict[str, str]]:
    """The columns of each row of a table of nccl-tests, by name, without blank ones."""
    matches = (_ROW.fullmatch(line.rstrip()) for line in text.splitlines())
    return [{name: value for name, value in zip(_FIELDS, match.groups(), strict=True) if value is not None}
            for match in matches if match]  # fmt: skip
