"""The loss of plain text, in windows of the model's length."""

from collections.abc import Iterator, Sequence

from zaya_jax.data.tokenizer import Tokenizer
from zaya_jax.errors import InputError
from zaya_jax.evaluate.heldout_run import TextLoss
from zaya_jax.evaluate.scoring import Progress, Request, Scorer
from zaya_jax.run.files import read_text


def windows(tokens: Sequence[int], prefix: int, length: int) -> Iterator[Request]:
    """Split a text into windows that predict each token once, with as much context as fits.

    As in lm-eval, all windows but the last follow each other with one token of context, and the last one is filled with
    context up to `length`.

    Args:
      tokens: of the text.
      prefix: token before the first.
      length: tokens of a window.
    """
    text = [prefix, *tokens]
    for start in range(0, len(tokens), length):
        end = min(start + length, len(tokens))
        first = 0 if start == 0 else end - length
        yield Request(text[first : start + 1], text[start + 1 : end + 1])


def read_texts(paths: Sequence[str]) -> dict[str, str]:
    """Read text files by path; InputError if one is missing, empty or not UTF-8."""
    texts = {}
    for path in paths:
        texts[path] = read_text(path, "--text")
        if not texts[path]:
            raise InputError(f"--text {path} is empty, but must have text to score.")
    return texts


def prefix_token(tokenizer: Tokenizer) -> int:
    """Return the token before the first of a text: the one that begins a document, else the one that ends one."""
    return [*tokenizer.prefix, tokenizer.eot][0]


def text_losses(
    scorer: Scorer, tokenizer: Tokenizer, texts: dict[str, str], progress: Progress | None = None
) -> dict[str, TextLoss]:
    """Compute the loss of each text, the first token after `prefix_token`."""
    prefix = prefix_token(tokenizer)
    encoded = {}
    for name, text in texts.items():
        try:
            [encoded[name]] = tokenizer.encode_counted([text])
        except InputError as error:
            raise InputError(f"--text {name} cannot be scored. {error}") from error
    requests = [(name, window) for name, (tokens, _) in encoded.items()
                for window in windows(tokens, prefix, scorer.max_length)]  # fmt: skip
    nats = dict.fromkeys(texts, 0.0)
    scores = scorer.score([window for _, window in requests], progress=progress)
    for (name, _), score in zip(requests, scores, strict=True):
        nats[name] -= score.logprob
    return {name: TextLoss(nats[name], len(encoded[name][0]), len(text.encode()) - encoded[name][1], encoded[name][1])
            for name, text in texts.items()}  # fmt: skip
