"""Score continuations: their log-likelihoods, many requests packed into rows of a few fixed lengths.

Packed documents never see each other, so a request scores the same in every row. All batches of a length have the same
number of rows: any set of requests needs at most one compilation per length. Requests with the same input, such as the
answers A, B, C and D to a question, are one document, and the head is applied only where a continuation is scored.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from zaya_jax.config.checks import counted
from zaya_jax.data.loading.bin_packing import pack
from zaya_jax.data.tokenizer import Tokenizer
from zaya_jax.errors import InputError
from zaya_jax.evaluate.heldout import HeldoutLoss
from zaya_jax.job.multihost import all_gather
from zaya_jax.model.loss import chunked_logprobs
from zaya_jax.model.zaya import Zaya
from zaya_jax.parallel.decode import REPLICATED, ROWS, place
from zaya_jax.parallel.mesh import batch_shards
from zaya_jax.parallel.placement import Placement

ROW = 2048  # tokens of the shortest rows
_GROWTH = 8  # factor between lengths of rows
TOKENS = 8192  # tokens of a device in one forward pass, or one row if that is longer
_AHEAD = 2  # batches in flight
PEER_SECONDS = 24 * 3600  # how much longer the slowest process may take than the fastest

Progress = Callable[[int, int], object]  # (requests done, requests in total)


class Request(NamedTuple):
    """A continuation to score after a context, both as token ids; neither may be empty."""

    context: Sequence[int]
    continuation: Sequence[int]


class Score(NamedTuple):
    """The score of a continuation."""

    logprob: float  # log-probability of all its tokens in nats
    is_greedy: bool  # whether each token is the most likely one


class _Document(NamedTuple):
    """An input that one or several requests share."""

    tokens: Sequence[int]
    requests: list[int]  # indices
    queries: int  # number of tokens to score


class _Batch(NamedTuple):
    arrays: dict[str, np.ndarray]
    owners: list[np.ndarray]  # for each device, request of each of its queries


class Scorer:
    """Scores requests with a model."""

    def __init__(
        self, model: Zaya, placement: Placement, *, max_length: int | None = None, tokens: int = TOKENS
    ) -> None:
        """Prepare to score with a model as stored: one that is `unrolled` takes long to compile.

        A device gets so many `tokens` in one forward pass. Inputs longer than `max_length` tokens, by default the
        model's positions, lose their beginning. See `generate.placement.decode_placement`.
        """
        self.model, self.placement = place(placement.mesh, model, REPLICATED), placement
        self.max_length = min(max_length or model.config.max_positions, model.config.max_positions)
        self.lengths = [min(ROW, self.max_length)]  # of rows, with at most one compilation each
        while self.lengths[-1] < self.max_length:
            self.lengths.append(min(self.lengths[-1] * _GROWTH, self.max_length))
        self._tokens, self._devices = tokens, batch_shards(self.placement.mesh)

    def score(self, requests: Sequence[Request], *, progress: Progress | None = None) -> list[Score]:
        """Score requests; each process of a job must pass the same ones, and scores its share.

        InputError if a request is empty, or its continuation is longer than `max_length`.
        """
        count, part = jax.process_count(), jax.process_index()
        own = range(part, len(requests), count)
        logprobs, wrong = self._score([requests[index] for index in own], progress)
        shares = all_gather("scores", list(map(list, zip(logprobs, wrong, strict=True))), PEER_SECONDS)
        scores = [Score(0.0, is_greedy=True)] * len(requests)
        for process, share in enumerate(shares):
            for index, (logprob, bad) in zip(range(process, len(requests), count), share, strict=True):
                scores[index] = Score(logprob, not bad)
        return scores

    def _score(self, requests: Sequence[Request], progress: Progress | None) -> tuple[list[float], list[int]]:
        """Return the log-likelihood of each request, and how many of its tokens are not the most likely ones."""
        logprobs, wrong = np.zeros(len(requests)), np.zeros(len(requests), np.int64)
        queries, done = sum(len(request.continuation) for request in requests), 0
        running: deque[tuple[Any, _Batch]] = deque()

        def finish() -> None:
            nonlocal done
            outputs, batch = running.popleft()
            for device, owners in enumerate(batch.owners):
                values, greedy = (np.asarray(x)[device, : len(owners)] for x in outputs)
                np.add.at(logprobs, owners, values.astype(np.float64))
                np.add.at(wrong, owners, ~greedy)
                done += len(owners)
            if progress is not None:
                progress(round(len(requests) * done / queries), len(requests))

        for batch in self._batches(requests):
            arrays = place(self.placement.mesh, batch.arrays, ROWS)
            running.append((score_batch(self.model, arrays, placement=self.placement), batch))
            if len(running) > _AHEAD:
                finish()
        while running:
            finish()
        return logprobs.tolist(), wrong.tolist()

    def _batches(self, requests: Sequence[Request]) -> Iterator[_Batch]:
        documents = _documents(requests, self.max_length, self.lengths[0])
        for shortest, length in zip([0, *self.lengths], self.lengths, strict=False):
            fitting = [document for document in documents if shortest < _size(document) <= length]
            if not fitting:
                continue
            bins = pack(np.array([_size(document) for document in fitting]), length)
            rows = max(1, self._tokens // length)  # of a device
            packed = [[fitting[index] for index in each] for each in bins]
            for start in range(0, len(bins), rows * self._devices):
                yield _batch(packed[start : start + rows * self._devices], requests, length, rows, self._devices)


def _documents(requests: Sequence[Request], longest: int, queries: int) -> list[_Document]:
    """List the inputs; one that many requests share appears again after every `queries` tokens to score."""
    documents: list[_Document] = []
    last: dict[tuple[int, ...], int] = {}  # input → its newest document
    for index, (context, continuation) in enumerate(requests):
        if not context or not continuation or len(continuation) > longest:
            request = f"{counted(len(continuation), 'token')} after {counted(len(context), 'token')} of context"
            raise InputError(f"A task asks to score {request}, but must ask for 1 to {longest:,} after at least 1.")
        tokens = tuple([*context, *continuation][-(longest + 1) : -1])
        count, place = len(continuation), last.get(tokens)
        if place is not None and documents[place].queries + count <= max(queries, len(tokens)):
            before = documents[place]
            documents[place] = _Document(tokens, [*before.requests, index], before.queries + count)
        else:
            last[tokens] = len(documents)
            documents.append(_Document(tokens, [index], count))
    return documents


def _size(document: _Document) -> int:
    """Return the part of a row that a document takes; rows have room for as many queries as tokens."""
    return max(len(document.tokens), document.queries)


def _batch(
    packed: Sequence[Sequence[_Document]], requests: Sequence[Request], length: int, rows: int, devices: int
) -> _Batch:
    """Lay documents out in `rows` rows of each device."""
    tokens, segments = np.zeros((2, rows * devices, length), np.int32)
    index, targets = np.zeros((2, devices, rows * length), np.int32)
    owners: list[list[int]] = [[] for _ in range(devices)]
    for row, documents in enumerate(packed):
        device, start = row // rows, 0
        for number, document in enumerate(documents, 1):
            end = start + len(document.tokens)
            tokens[row, start:end], segments[row, start:end] = document.tokens, number
            for request in document.requests:
                continuation, first = requests[request].continuation, len(owners[device])
                place = slice(first, first + len(continuation))
                last = row % rows * length + end
                index[device, place] = np.arange(last - len(continuation), last)
                targets[device, place] = continuation
                owners[device] += [request] * len(continuation)
            start = end
    counts = np.array([len(own) for own in owners], np.int32)
    arrays = {"tokens": tokens, "segment_ids": segments, "index": index, "targets": targets, "counts": counts}
    return _Batch(arrays, [np.array(own, np.int64) for own in owners])


@functools.partial(jax.jit, static_argnames="placement")
def score_batch(model: Zaya, batch: dict[str, jax.Array], *, placement: Placement) -> tuple[jax.Array, jax.Array]:
    """Score the queries of a batch with a replicated model; returns `loss.chunked_logprobs` of each device, [n, q].

    The batch has int32 `tokens` and `segment_ids` [rows, length]; for each device n its queries `index` (into its rows
    one after the other) and `targets` [n, q], and their number `counts` [n].
    """

    def local(model: Zaya, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out: Any = model(batch["tokens"], batch["segment_ids"], ops=placement.ops)
        bias = model.head_bias[...] if model.config.head_bias else None
        hidden_td = out.hidden_bsd.reshape(-1, out.hidden_bsd.shape[-1])
        index, targets, count = (batch[name][0] for name in ("index", "targets", "counts"))
        logprobs, greedy = chunked_logprobs(hidden_td, model.embedding[...], bias, index, targets, count)
        return logprobs[None], greedy[None]

    specs: dict[str, Any] = {"in_specs": (REPLICATED, ROWS), "out_specs": (ROWS, ROWS)}
    # check_vma rejects kernels, see `parallel.gradient`.
    return jax.shard_map(local, mesh=placement.mesh, check_vma=False, **specs)(model, batch)


def windows(tokens: Sequence[int], prefix: int, length: int) -> Iterator[Request]:
    """Split a text into windows that predict each token once, with as much context as fits.

    As in lm-eval, all windows but the last follow each other with one token of context, and the last one is filled with
    context up to `length` tokens. The token `prefix` stands before the first.
    """
    text = [prefix, *tokens]
    for start in range(0, len(tokens), length):
        end = min(start + length, len(tokens))
        first = 0 if start == 0 else end - length
        yield Request(text[first : start + 1], text[start + 1 : end + 1])


def window_sums(
    scorer: Scorer, texts: Iterable[Sequence[int]], prefix: int, progress: Progress | None = None
) -> list[float]:
    """Return the log-likelihood of each text, given as tokens: the sum over its `windows`."""
    texts = list(texts)
    parts = [(index, each) for index, text in enumerate(texts) for each in windows(text, prefix, scorer.max_length)]
    sums = [0.0] * len(texts)
    scores = scorer.score([window for _, window in parts], progress=progress)
    for (index, _), score in zip(parts, scores, strict=True):
        sums[index] += score.logprob
    return sums


def prefix_token(tokenizer: Tokenizer) -> int:
    """Return the token before the first of a text: the one that begins a document, else the one that ends one."""
    return [*tokenizer.prefix, tokenizer.eot][0]


def text_losses(
    scorer: Scorer, tokenizer: Tokenizer, texts: dict[str, str], progress: Progress | None = None
) -> dict[str, tuple[HeldoutLoss, int, int]]:
    """Return the loss of each text, the first token after `prefix_token`, and the bytes with and without a token."""
    encoded: dict[str, tuple[list[int], int]] = {}
    for name, text in texts.items():
        try:
            [encoded[name]] = tokenizer.encode_counted([text])
        except InputError as error:
            raise InputError(f"--text {name} cannot be scored. {error}") from error
    nats = window_sums(scorer, [tokens for tokens, _ in encoded.values()], prefix_token(tokenizer), progress)
    return {
        name: (HeldoutLoss(0.0 - logprob, len(tokens)), len(texts[name].encode()) - lost, lost)
        for logprob, (name, (tokens, lost)) in zip(nats, encoded.items(), strict=True)
    }
