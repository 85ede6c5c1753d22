"""Continue many prompts with an engine, whose slots they share."""

import functools
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import jax

from zaya_jax.data.tokenizer import Tokenizer
from zaya_jax.evaluate.scoring import PEER_SECONDS, Progress
from zaya_jax.generate.engine import Engine
from zaya_jax.generate.sampling import Sampling
from zaya_jax.generate.text import holds_stop
from zaya_jax.job.multihost import all_gather
from zaya_jax.model.zaya import Zaya
from zaya_jax.parallel.mesh import batch_shards
from zaya_jax.parallel.placement import Placement

ROWS = 16  # prompts that a device continues together


class Prompt(NamedTuple):
    """A prompt, and how to continue it."""

    tokens: Sequence[int]  # of the prompt; too many lose their beginning
    seed: int  # of its random stream, see `prompt_seed`
    max_new_tokens: int  # largest number of new tokens; fewer than the model's positions
    sampling: Sampling  # how to draw them
    stop: tuple[str, ...] = ()  # texts that end the continuation before them


def prompt_seed(seed: int, text: str, sample: int) -> int:
    """Return the seed of the `sample`-th continuation of a text, which depends on nothing else."""
    return int.from_bytes(hashlib.sha256(f"{seed} {sample} {text}".encode()).digest()[:4], "big")


class Writer:
    """Continues prompts."""

    def __init__(
        self, model: Zaya, tokenizer: Tokenizer, stop_tokens: Sequence[int], placement: Placement, rows: int = ROWS
    ) -> None:
        """Prepare to continue so many prompts (`rows`) on a device together; every device has the model."""
        self._slots, self._config = rows * batch_shards(placement.mesh), model.config
        self._tokenizer = tokenizer
        self._engine = Engine(model, placement, slots=self._slots, length=1, stop_tokens=stop_tokens)

    def write(self, prompts: Sequence[Prompt], *, progress: Progress | None = None) -> list[list[int]]:
        """Return the new tokens of each prompt, with those of a stop text.

        Each process of a job must pass the same prompts, and continues its share.
        """
        count = jax.process_count()
        # All processes reserve the same, so that they need the same time.
        longest = max((len(prompt.tokens) + prompt.max_new_tokens for prompt in prompts), default=1)
        self._engine.reserve(self._slots, longest)
        written = self._write(prompts[jax.process_index() :: count], progress)
        answers: list[list[int]] = [[] for _ in prompts]
        for process, share in enumerate(all_gather("continuations", written, PEER_SECONDS)):
            for index, tokens in zip(range(process, len(prompts), count), share, strict=True):
                answers[index] = tokens
        return answers

    def _write(self, prompts: Sequence[Prompt], progress: Progress | None) -> list[list[int]]:
        handles: dict[int, int] = {}
        # The longest first, so that few are left for the end.
        for index in sorted(range(len(prompts)), key=lambda index: -prompts[index].max_new_tokens):
            text, seed, new, sampling, stop = prompts[index]
            text = list(text[-(self._config.max_positions - new) :])
            stopped = functools.partial(holds_stop, self._tokenizer, text, stop=stop) if stop else None
            handles[self._engine.submit(text, new, sampling, seed=seed, stopped=stopped)] = index
        answers: list[list[int]] = [[] for _ in prompts]
        finished = (update for update in self._engine.updates() if update.finished)
        for done, update in enumerate(finished, 1):
            answers[handles[update.handle]] = update.continuation.tokens
            if progress is not None:
                progress(done, len(prompts))
        return answers
