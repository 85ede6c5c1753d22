"""Markovian recursive self-aggregation: rounds of candidates, each written from the ends of some of the last round's.

The method of ZAYA1-8B's best scores (docs/reference.md §13). Prompts have only the last `tail` tokens of candidates.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from zaya_jax.config.checks import require
from zaya_jax.data.tokenizer import Tokenizer

# Question, and the tails of candidates → prompt. The published prompt is unknown; this one is ours.
_PROMPT = """{question}

Below are the ends of {count} attempts at this task. They may be wrong, and they may disagree. Compare them, keep what
is right, correct what is not, and write one complete, improved solution.

{attempts}"""


class MarkovianRSA(NamedTuple):
    """Settings of the method; the defaults are those recommended for ZAYA1-8B."""

    candidates: int = 16  # N, candidates of each round
    aggregated: int = 4  # C, candidates of the last round that a new one is written from
    rounds: int = 2  # T, rounds after the first; 0 writes independent candidates
    tail: int = 4096  # τ, tokens of a candidate that are carried over

    def check(self, prefix: str) -> None:
        """Raise `InputError` if a value is out of range; `prefix` precedes the names in messages."""
        for name, value in self._asdict().items():
            least = 0 if name == "rounds" else 1
            require(value >= least, f"{prefix}{name}", value, f"at least {least}")
        most = f"at most the number of candidates ({self.candidates})"
        require(self.aggregated <= self.candidates, f"{prefix}aggregated", self.aggregated, most)


def aggregate_recursively(
    write: Callable[..., list[list[int]]], tokenizer: Tokenizer, question: str, settings: MarkovianRSA, seed: int = 0
) -> list[list[int]]:
    """Return the tokens of the last round's candidates; InputError for invalid settings.

    `write` generates the tokens of a round's candidates from their prompts and seeds. `seed` is that of the choice of
    candidates, and of the first candidate; each further one has the next seed.
    """
    settings.check("")
    count, draw = settings.candidates, np.random.default_rng(seed)
    candidates = write([question] * count, range(seed, seed + count))
    for round_index in range(1, settings.rounds + 1):
        tails = [tokenizer.decode(candidate[-settings.tail :]) for candidate in candidates]
        chosen = [draw.choice(count, settings.aggregated, replace=False) for _ in range(count)]
        prompts = [_prompt(question, [tails[index] for index in indices]) for indices in chosen]
        first = seed + round_index * count
        candidates = write(prompts, range(first, first + count))
    return candidates


def _prompt(question: str, tails: Sequence[str]) -> str:
    attempts = "\n\n".join(f"Attempt {number}:\n{tail}" for number, tail in enumerate(tails, 1))
    return _PROMPT.format(question=question, count=len(tails), attempts=attempts)
