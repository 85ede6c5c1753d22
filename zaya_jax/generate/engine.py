"""Generate token ids for many requests at once: they join and leave slots between blocks of steps."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from zaya_jax.config import ModelConfig
from zaya_jax.config.checks import counted, require
from zaya_jax.errors import InputError
from zaya_jax.generate.placement import FIRST_DEVICE, decode_placement
from zaya_jax.generate.sampling import Sampling
from zaya_jax.generate.steps import BLOCK, Chunk, Programs, Rows, empty_state, make_programs, state_bytes
from zaya_jax.model.zaya import Zaya, unrolled
from zaya_jax.ops.grouped_matmul import ONE_SIZE
from zaya_jax.ops.selfcheck import free_memory
from zaya_jax.parallel.decode import REPLICATED, place
from zaya_jax.parallel.mesh import batch_shards
from zaya_jax.parallel.placement import Placement
from zaya_jax.run.host_memory import free_memory as host_free_memory
from zaya_jax.run.table import size_text

SLOTS = 64  # most requests of `generate_tokens` that are decoded together
CHUNK = 512  # tokens of a prompt that one call processes
Work = Literal["prefill", "decode"]  # of a call: a chunk of prompts, or a block of steps
_PADDED_CACHE = 2**17  # most tokens of a cache whose slots are padded on GPUs
LEAST = 64  # tokens of a call for a short prompt, or the end of a long one


class CacheTooLarge(InputError, MemoryError):
    """The cache of an engine does not fit in the memory that is free."""


class Continuation(NamedTuple):
    """The text generated for a prompt, as tokens."""

    tokens: list[int]  # the new tokens, without the stop token
    logprobs: list[float]  # log-probability of each under the model, in nats, before temperature and other settings
    stopped: bool  # whether a stop token, or `stopped` of `Engine.submit`, ended it


NOTHING = Continuation([], [], stopped=False)


class Update(NamedTuple):
    """A request after a block of steps."""

    handle: int  # of `Engine.submit`
    continuation: Continuation  # so far
    finished: bool  # whether it has ended


@dataclasses.dataclass
class _Request:
    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    seed: int
    stopped: Callable[[list[int]], bool] | None
    read: int = 0  # tokens of the prompt that were processed
    so_far: Continuation = NOTHING

    @property
    def decodes(self) -> bool:
        return self.read == len(self.prompt)

    @property
    def drawn(self) -> int:
        """Number of tokens drawn, the one that the end of the prompt has drawn included."""
        return max(len(self.so_far.tokens), int(self.decodes))

    @property
    def left(self) -> int:
        return self.max_new_tokens - self.drawn if self.decodes else 0

    def extend(self, tokens: list[int], logprobs: list[float], stops: frozenset[int]) -> bool:
        """Add drawn tokens, -1 after the last one; returns whether the request has ended."""
        count = next((index for index, token in enumerate(tokens) if token < 0 or token in stops), len(tokens))
        stopped = count < len(tokens) and tokens[count] >= 0
        before = self.so_far
        tokens, logprobs = [*before.tokens, *tokens[:count]], [*before.logprobs, *logprobs[:count]]
        stopped = stopped or (self.stopped is not None and self.stopped(tokens))
        self.so_far = Continuation(tokens, logprobs, stopped)
        return stopped or len(tokens) == self.max_new_tokens


class Engine:
    """Generates from requests of any length, up to `slots` at a time.

    A request gets a slot of the cache when one is free, and leaves it when it ends; nothing is compiled for it. Before
    each block of steps, each new prompt advances by up to `CHUNK` tokens. The continuation of a request depends on its
    prompt, sampling and seed, and on `slots` and `length`, but not on other requests: it is bitwise the same.

    What depends on the model alone happens once: choice of kernels, placing of the parameters, compilation.
    """

    def __init__(
        self, model: Zaya, placement: Placement | None = None, *, slots: int, length: int,
        stop_tokens: Iterable[int] = (), options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Prepare to generate; the first request allocates the cache.

        Args:
          model: the model, perhaps `unrolled`, which saves a copy of the layers' parameters.
          placement: `decode_placement` or, after training, `Placement.replicated`, in the model's dtypes; the same one
            in all processes that hold the model together. None for the first device.
          slots: number of requests that are decoded together on all devices, rounded up to equal parts, on GPUs of
            eight slots, or two of a long `length`; on CPUs at most 256 a device, and further requests wait.
          length: largest number of tokens of a prompt and its continuation, rounded up to one of a few classes.
          stop_tokens: each ends a request when it is drawn; not part of the continuation.
          options: options of XLA's compiler.

        InputError if `slots`, `length` or a stop token is out of range; `CacheTooLarge`.
        """
        self._stops = frozenset(stop_tokens)
        _check_tokens("stop_tokens contains", self._stops, model.config)
        self.placement = decode_placement(model, FIRST_DEVICE) if placement is None else placement
        self._model, self.config, self._options = model, model.config, tuple(sorted((options or {}).items()))
        self._last_calls: dict[str, tuple[Any, ...]] = {}
        self._handle = 0
        self._open(slots, length)

    def _open(self, slots: int, length: int) -> None:
        """Prepare empty slots."""
        most = self.config.max_positions
        require(slots >= 1, "slots", slots, "at least 1")
        require(1 <= length <= most, "length", length, f"from 1 to {most}, the model's positions")
        self._shards = batch_shards(self.placement.mesh)
        self._asked = slots  # a longer cache can have fewer rows of padding
        length = min(capacity_class(length), most)
        platform = jax.local_devices()[0].platform
        slots = self._capped(max(-(-slots // self._shards), least_rows(platform, length)) * self._shards)
        own = slots // self._shards
        needed = state_bytes(self._model, slots, length, self.placement)
        _check_memory(slots, length, needed)
        self.slots, self.length, self.cache_bytes = slots, length, needed  # bytes of a device
        self._state: Any = None
        self._requests: dict[int, _Request] = {}  # all that have not ended, by handle
        self._waiting = collections.deque[int]()  # handles without a slot
        self._running: dict[int, int] = {}  # slot → handle
        # Shards take turns, so that requests are spread over them.
        self._free = collections.deque(shard * own + index for index in range(own) for shard in range(self._shards))

    @functools.cached_property
    def _compiled(self) -> tuple[list[jax.Array], Programs]:
        """The leaves of the model on its devices, and the programs that take them."""
        self._model = unrolled(place(self.placement.mesh, self._model, REPLICATED))
        leaves, structure = jax.tree.flatten(self._model)
        return leaves, make_programs(structure, self.placement, self._options)

    def _capped(self, slots: int) -> int:
        return min(slots, ONE_SIZE * self._shards) if jax.local_devices()[0].platform == "cpu" else slots

    def reserve(self, slots: int, length: int) -> None:
        """Make at least so many slots, but at most 256 a CPU, of this length, or of the model's positions if fewer.

        An engine that has them stays as it is. Otherwise the cache is allocated anew, and the next step is compiled for
        it. `CacheTooLarge` if the new one does not fit in memory, ValueError if there are requests that have not ended.
        """
        length = min(length, self.config.max_positions)
        if self._capped(slots) <= max(self.slots, self._asked) and length <= self.length:
            return
        if self.busy:
            raise ValueError("An engine with requests cannot get other slots: let them end, or cancel them.")
        self._state = None
        self._open(max(slots, self._asked), max(length, self.length))

    def submit(
        self, tokens: Sequence[int], max_new_tokens: int, sampling: Sampling | None = None, *, seed: int = 0,
        stopped: Callable[[list[int]], bool] | None = None,
    ) -> int:  # fmt: skip
        """Add a request for `step`, and return its handle.

        Args:
          tokens: token ids of the prompt.
          max_new_tokens: largest number of tokens to add.
          sampling: how to draw tokens; None takes the most likely one.
          seed: seed of the random stream.
          stopped: called with the new tokens after each block of steps; True ends the request.

        InputError if the prompt is empty or has a token outside the vocabulary, a setting is out of range, or prompt
        and new tokens exceed `length`.
        """
        prompt, sampling = list(map(int, tokens)), sampling or Sampling()
        if not prompt:
            raise InputError("A prompt is empty, but must have at least one token.")
        _check_tokens("A prompt contains", prompt, self.config)
        sampling.check()
        require(max_new_tokens >= 1, "max_new_tokens", max_new_tokens, "at least 1")
        if len(prompt) + max_new_tokens > self.length:
            problem = f"A prompt ({counted(len(prompt), 'token')}) and max_new_tokens={max_new_tokens} exceed"
            limit = "model.max_positions" if self.length == self.config.max_positions else "the engine's length"
            raise InputError(f"{problem} {limit}={self.length}. Shorten one of them.")
        request = _Request(prompt, max_new_tokens, sampling, seed % 2**32, stopped)
        self._handle += 1
        self._requests[self._handle] = request
        self._waiting.append(self._handle)
        return self._handle

    def cancel(self, handle: int) -> None:
        """End a request, which gets no further update, and free its slot; does nothing if it has ended."""
        self._requests.pop(handle, None)
        if handle in self._waiting:
            self._waiting.remove(handle)
        for slot in [slot for slot, running in self._running.items() if running == handle]:
            del self._running[slot]
            self._free.append(slot)

    @property
    def busy(self) -> bool:
        """Whether there are requests that have not ended."""
        return bool(self._requests)

    def updates(self, block: int = BLOCK) -> Iterator[Update]:
        """Run all requests, and yield the updates of every `step`; requests may be added and cancelled meanwhile."""
        while self.busy:
            yield from (update for update in self.step(block) if update.finished or update.handle in self._requests)

    def step(self, block: int = BLOCK) -> list[Update]:
        """Process parts of new prompts, then decode up to `block` steps; returns an update of each decoded request."""
        while self._free and self._waiting:
            self._running[self._free.popleft()] = self._waiting.popleft()
        try:
            calls = [*self._prefill(), *self._decode(min(block, BLOCK))]
            updates = [self._extend(*drawn) for drawn in self._read(calls).items()]
        except BaseException:
            # What was drawn is lost. Requests that continue begin again, with the same tokens.
            self._state = None
            for handle in self._running.values():
                self._requests[handle].read, self._requests[handle].so_far = 0, NOTHING
            raise
        for update in updates:
            if update.finished:
                self.cancel(update.handle)
        return updates

    def _read(self, calls: list[Any]) -> dict[int, tuple[list[int], list[float]]]:
        """Wait for calls, and return the tokens and log-probabilities that each request drew."""
        drawn: dict[int, tuple[list[int], list[float]]] = {}
        for slots, *results in calls:
            tokens, logprobs = (np.atleast_2d(np.asarray(result)).T.tolist() for result in results)
            for slot, column in slots.items():
                before = drawn.setdefault(self._running[slot], ([], []))
                before[0].extend(tokens[column])
                before[1].extend(logprobs[column])
        return drawn

    def _extend(self, handle: int, drawn: tuple[list[int], list[float]]) -> Update:
        request = self._requests[handle]
        finished = request.extend(*drawn, self._stops)
        return Update(handle, request.so_far, finished)

    def _prefill(self) -> list[Any]:
        """Process up to `CHUNK` tokens of each new prompt; returns the calls in which one ended, with slot → column."""
        own, calls = self.slots // self._shards, list[Any]()
        prompts = {slot: self._requests[handle] for slot, handle in self._running.items()}
        left = {slot: CHUNK for slot, request in prompts.items() if not request.decodes}
        while left:
            size = self._chunk_size(prompts[next(iter(left))])
            chosen = {slot // own: slot for slot in left if self._chunk_size(prompts[slot]) == size}  # one of a shard
            results = self._run_chunk(size, {shard: (slot % own, prompts[slot]) for shard, slot in chosen.items()})
            ended = {slot: shard for shard, slot in chosen.items() if prompts[slot].decodes}
            calls += [(ended, *results)] if ended else []
            left |= {slot: left[slot] - size for slot in chosen.values()}
            left = {slot: rest for slot, rest in left.items() if rest > 0 and not prompts[slot].decodes}
        return calls

    def _chunk_size(self, request: _Request) -> int:
        large = min(CHUNK, self.length)
        return large if len(request.prompt) - request.read > large // 2 else min(LEAST, large)

    def _run_chunk(self, size: int, prompts: dict[int, tuple[int, _Request]]) -> Any:
        """Process the next tokens of a prompt of each shard: shard → slot there, and request."""
        tokens, (count, start, slot) = np.zeros((self._shards, size), np.int32), np.zeros((3, self._shards), np.int32)
        requests: list[_Request | None] = [None] * self._shards
        for shard, (slot[shard], request) in prompts.items():
            piece = request.prompt[request.read : request.read + size]
            tokens[shard, : len(piece)], count[shard], start[shard] = piece, len(piece), request.read
            requests[shard], request.read = request, request.read + len(piece)
        left = [int(request is not None and request.decodes) for request in requests]
        rows = make_rows(requests, [0] * self._shards, left)
        return self._call("prefill", Chunk(tokens, count, start, slot), rows)

    def _decode(self, block: int) -> list[Any]:
        """Decode up to `block` steps of the requests whose prompts have been processed."""
        running = {slot: self._requests[handle] for slot, handle in self._running.items()}
        requests = [running.get(slot) for slot in range(self.slots)]
        drawn, left = ([getattr(request, name, 0) for request in requests] for name in ("drawn", "left"))
        if not any(left):
            return []
        stops = np.array(sorted(self._stops) or [-1], np.int32)
        rows, steps = make_rows(requests, drawn, left), np.int32(min(block, max(left)))
        results = self._call("decode", rows, stops, steps)
        return [({slot: slot for slot in range(self.slots) if left[slot]}, *results)]

    def _call(self, work: Work, *arguments: Any) -> Any:
        if self._state is None:
            self._state = empty_state(self._model, self.slots, self.length, self.placement)
        leaves, programs = self._compiled
        self._last_calls[work] = arguments
        self._state, *results = getattr(programs, work)(leaves, self._state, *arguments)
        return results

    def compile_again(self, work: Work) -> Any:
        """Return the compiled program of the last call of this kind, to be read; compiles it once more."""
        leaves, programs = self._compiled
        return getattr(programs, work).lower(leaves, self._state, *self._last_calls[work]).compile()


def make_rows(requests: Sequence[_Request | None], drawn: list[int], left: list[int]) -> Rows:
    """Return the rows of requests, None for a slot without one, with the tokens that each has drawn and will draw."""
    seeds = np.array([0 if request is None else request.seed for request in requests], np.uint32)
    values = [Sampling() if request is None else request.sampling for request in requests]
    sampling = Sampling(*np.array(values, np.float32).T.copy())
    return Rows(seeds, np.array(drawn, np.int32), np.array(left, np.int32), sampling)


def capacity_class(length: int) -> int:
    """Round up to a class of capacities: four for each power of two, since a step reads the whole cache."""
    step = max(LEAST, 1 << (length - 1).bit_length()) // 4
    return -(-length // step) * step


def least_rows(platform: str, length: int) -> int:
    """Return the smallest number of slots of a device, for this length.

    XLA pads products of fewer than eight rows on GPUs, one by one. It multiplies a single row elementwise, which writes
    all products: two rows avoid that where the cache of eight would be large.
    """
    if platform == "cpu":
        return 1
    return 8 if 8 * length <= _PADDED_CACHE else 2


def _check_tokens(what: str, tokens: Iterable[int], config: ModelConfig) -> None:
    """Raise `InputError` if a token is outside of the vocabulary."""
    for unknown in (token for token in tokens if not 0 <= token < config.vocab_size):
        raise InputError(f"{what} token {unknown}, but tokens must be from 0 to {config.vocab_size - 1}.")


def _check_memory(slots: int, length: int, needed: int) -> None:
    cpu = jax.local_devices()[0].platform == "cpu"
    free = host_free_memory() // jax.local_device_count() if cpu else free_memory()
    if needed > free:
        size = f"The cache of {counted(slots, 'request')} of {counted(length, 'token')} takes {size_text(needed)}"
        problem = f"{size} on a device, but {size_text(free)} are free"
        raise CacheTooLarge(f"{problem}. Generate fewer at once, or shorten prompts and continuations.")
