"""Continue many prompts: all batches have one size and one cache capacity, so that they share compilations."""

import functools
import hashlib
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from zaya_jax.data.tokenizer import Tokenizer
from zaya_jax.evaluate.scoring import PEER_SECONDS, Progress
from zaya_jax.generate.decode import BLOCK, cache_capacity, continuations
from zaya_jax.generate.sampling import Sampling
from zaya_jax.job.multihost import all_gather
from zaya_jax.model.zaya import Zaya, unrolled
from zaya_jax.parallel.mesh import batch_shards
from zaya_jax.parallel.placement import Placement

ROWS = 16  # prompts of a device in one batch


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
        """Prepare to continue in batches with so many `rows` a device; the model is as stored, on every device."""
        self.model, self.placement, self.rows = model, placement, rows
        self._tokenizer, self._stops = tokenizer, stop_tokens

    @functools.cached_property
    def _unrolled(self) -> Zaya:
        """A copy of the model, made once; otherwise decoding would make one for each batch."""
        return unrolled(self.model)

    def write(self, prompts: Sequence[Prompt], *, progress: Progress | None = None) -> list[list[int]]:
        """Return the new tokens of each prompt, with those of a stop text.

        Each process of a job must pass the same prompts, and continues its share.
        """
        config, count = self.model.config, jax.process_count()
        sizes = ((len(prompt.tokens), prompt.max_new_tokens) for prompt in prompts)
        fitting = ((min(tokens, config.max_positions - new), new) for tokens, new in sizes)
        # One capacity for all processes, so that they need the same time.
        capacity = max((cache_capacity(*each, config) for each in fitting), default=0)
        written = self._write(prompts[jax.process_index() :: count], capacity, progress)
        answers: list[list[int]] = [[] for _ in prompts]
        for process, share in enumerate(all_gather("continuations", written, PEER_SECONDS)):
            for index, tokens in zip(range(process, len(prompts), count), share, strict=True):
                answers[index] = tokens
        return answers

    def _write(self, prompts: Sequence[Prompt], capacity: int, progress: Progress | None) -> list[list[int]]:
        groups: dict[tuple, list[int]] = defaultdict(list)
        for index, prompt in enumerate(prompts):
            groups[prompt[2:]].append(index)
        answers: list[list[int]] = [[] for _ in prompts]
        done, size = 0, self.rows * batch_shards(self.placement.mesh)
        for members in groups.values():
            members.sort(key=lambda index: -len(prompts[index].tokens))
            for start in range(0, len(members), size):
                batch = members[start : start + size]
                for index, tokens in zip(batch, self._batch([prompts[i] for i in batch], capacity, size), strict=True):
                    answers[index] = tokens
                done += len(batch)
                if progress is not None:
                    progress(done, len(prompts))
        return answers

    def _batch(self, prompts: list[Prompt], capacity: int, size: int) -> list[list[int]]:
        """Continue prompts with the same settings, in a batch filled up to `size` with rows that end at once."""
        _, _, new, sampling, stop = prompts[0]
        room = self.model.config.max_positions - new
        tokens = [list(prompt.tokens[-room:]) for prompt in prompts]
        spare = size - len(prompts)
        # A text of n bytes has at most n tokens, and may begin before the last block.
        tail = BLOCK + max((len(text.encode()) for text in stop), default=0)

        def stopped(index: int, new_tokens: list[int]) -> bool:
            if index >= len(prompts):
                return True
            before = [*tokens[index], *new_tokens[:-tail]]
            text = self._tokenizer.decode_after(before, new_tokens[-tail:]) if stop else ""
            return any(end in text for end in stop)

        rows, seeds = [*tokens, *[tokens[-1][-1:]] * spare], [*(prompt.seed for prompt in prompts), *[0] * spare]
        ends: dict[str, Any] = {"stop_tokens": self._stops, "stopped": stopped}
        options: dict[str, Any] = {"seeds": seeds, "placement": self.placement, "capacity": capacity, **ends}
        rows = deque(continuations(self._unrolled, rows, new, sampling, **options), maxlen=1).pop()
        return [row.tokens for row in rows[: len(prompts)]]
