"""Generate text from text: prompts are encoded, and continuations decoded as they grow, up to a stop string."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from zaya_jax.data.tokenizer import Tokenizer
from zaya_jax.errors import InputError
from zaya_jax.generate.decode import continuations
from zaya_jax.generate.engine import Continuation, Engine
from zaya_jax.generate.sampling import Sampling
from zaya_jax.generate.steps import BLOCK
from zaya_jax.model.zaya import Zaya
from zaya_jax.parallel.placement import Placement

_UNKNOWN = "\ufffd"  # of bytes that are not UTF-8, such as the first bytes of a character


class TextContinuation(NamedTuple):
    """The continuation of a prompt."""

    # what it adds to the text of the prompt's tokens, without stop strings and stop tokens. While it grows, what may
    # become a stop string or a character is held back.
    text: str
    tokens: list[int]  # the generated tokens, with those of a stop string
    logprobs: list[float]  # log-probability of each in nats, see `decode.Continuation`
    stopped: bool  # whether a stop token or stop string ended it


_NOTHING = TextContinuation("", [], [], stopped=False)


def generate_text(
    model: Zaya, tokenizer: Tokenizer, prompts: Sequence[str], max_new_tokens: int = 256,
    sampling: Sampling | None = None, *, stop_tokens: Iterable[int] | None = None, placement: Placement | None = None,
    **options: Any,
) -> list[str]:  # fmt: skip
    """Generate a continuation of each prompt.

    `stop_tokens`, by default the tokenizer's end of a document, and `placement` are those of `Engine`, `options` those
    of `stream_text`. `InputError` if `prompts` is a single text.
    """
    if isinstance(prompts, str):
        raise InputError(f"prompts is the text {prompts!r:.50}, but must be a list of texts, such as [text].")
    stops = [tokenizer.eot] if stop_tokens is None else stop_tokens
    engine = Engine(model, placement, slots=1, length=1, stop_tokens=stops)
    encoded = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    texts = stream_text(engine, tokenizer, encoded, max_new_tokens, sampling, **options)
    return [row.text for row in deque(texts, maxlen=1).pop()]


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Encode a prompt as the beginning of a document; an empty one is the end of the document before."""
    return [*tokenizer.prefix, *tokenizer.encode(prompt)] or [tokenizer.eot]


def stream_text(
    engine: Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    *,
    stop: Sequence[str] = (),
    **options: Any,
) -> Iterator[list[TextContinuation]]:
    """Yield the continuations so far, after each block of tokens, until all have ended.

    The arguments and `options` are those of `decode.continuations`, which says what raises `InputError`; prompts are
    token ids, see `encode_prompt`. Texts in `stop`, none of them empty, end a continuation before them, and so do the
    engine's stop tokens.
    """
    if not all(stop):
        raise InputError("A stop string is empty, but must have at least one character.")

    def stopped(index: int, tokens: list[int]) -> bool:
        return holds_stop(tokenizer, prompts[index], tokens, stop)

    before, shown = [None] * len(prompts), [_NOTHING] * len(prompts)
    for rows in continuations(engine, prompts, max_new_tokens, sampling, stopped=stopped if stop else None, **options):
        for index, row in enumerate(rows):
            if row is not before[index]:
                ended = row.stopped or len(row.tokens) == max_new_tokens
                shown[index] = _shown(tokenizer, prompts[index], row, ended, stop)
        before = rows
        yield list(shown)


def holds_stop(tokenizer: Tokenizer, prompt: Sequence[int], tokens: list[int], stop: Sequence[str]) -> bool:
    """Return whether one of the stop texts is in the newest tokens after a prompt."""
    # A text of n bytes has at most n tokens, and may begin before the tokens of the last block.
    tail = BLOCK + 1 + max((len(text.encode()) for text in stop), default=0)
    text = tokenizer.decode_after([*prompt, *tokens[:-tail]], tokens[-tail:])
    return any(end in text for end in stop)


def _shown(
    tokenizer: Tokenizer, prompt: Sequence[int], row: Continuation, ended: bool, stop: Sequence[str]
) -> TextContinuation:
    text = tokenizer.decode_after(prompt, row.tokens if ended else tokenizer.without_open_bytes(row.tokens))
    if places := [place for end in stop if (place := text.find(end)) >= 0]:
        text = text[: min(places)]
    elif not ended:
        text = text.rstrip(_UNKNOWN)
        starts = (end[:size] for end in stop for size in range(len(end) + 1))  # of a stop that is not complete yet
        text = text[: len(text) - max((len(start) for start in starts if text.endswith(start)), default=0)]
    return TextContinuation(text, row.tokens, row.logprobs, row.stopped)
