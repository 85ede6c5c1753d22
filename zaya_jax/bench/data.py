"""Data against its peers: packing against Grain's, preparing against `datasets`, and the memory both of ours take."""

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from zaya_jax.bench.corpora import write_drawn, write_lines
from zaya_jax.bench.data_peers import GrainSettings, datasets_preparing, find_datasets, grain_packing, time_batches
from zaya_jax.bench.memory import PeakMemory
from zaya_jax.bench.packing import measure_planning
from zaya_jax.config import (
    BatchConfig,
    Config,
    DataConfig,
    ModelConfig,
    PhaseConfig,
    SourceConfig,
    Table,
    TrainConfig,
)
from zaya_jax.data.corpus import find_corpus
from zaya_jax.data.pipeline import train_batches
from zaya_jax.data.prepare import PrepareSettings, prepare
from zaya_jax.data.sources import open_sources
from zaya_jax.data.tokenizer import train_tokenizer
from zaya_jax.machine.result import describe_run, rounded
from zaya_jax.machine.subprocesses import Passes, interleave, run_in_subprocess

WORKERS = 2

_THREADS = (0, 1, 2, 4, 16)  # of Grain's, tried in turn
_BUFFERS = (1, 4, 16)
_TRIES = 3  # passes of each
_SKIPPED = 50  # batches, more than any buffers hold


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    tokens: int = 20_000_000  # of the corpus that is packed
    shards: int = 10
    context: int = 4096
    batch: int = 8
    batches: int = 1000  # of a timed pass
    tried: int = 200  # of a pass that tries a setting of the peer
    text_bytes: int = 40_000_000  # of the input that is prepared
    unit_bytes: int = 2**20  # where memory is measured
    growth: int = 10  # of the larger input over the smaller one, where memory is measured
    planned: int = 10_000_000  # documents, lognormal ones
    vocab_size: int = 4096
    corpus: DataConfig = field(default_factory=DataConfig)  # whose text is prepared

    @property
    def pass_tokens(self) -> int:
        """Tokens of a timed pass of packing."""
        return self.batches * self.batch * self.context


class Inputs(NamedTuple):
    """What is read, all of it below one folder."""

    folder: Path
    tokenizer: Path
    lines: Path  # JSONL
    few_lines: Path  # less of it
    repeated_lines: Path  # these over and over: more input, and no longer documents
    drawn: Path  # a prepared folder of documents that were drawn
    few_drawn: Path  # with fewer of them


def bench_data(sizes: Sizes, repeats: int) -> dict[str, Any]:
    """Time both sides, and print the ratios and the memory.

    Args:
      sizes: of what is read.
      repeats: timed passes of each side, interleaved.

    Raises:
      InputError: a peer is not installed.
    """
    find_datasets()
    result = describe_run(
        "packing and preparing data",
        f"packing {sizes.tokens:,} tokens in windows of {sizes.context}, batch {sizes.batch}, {sizes.batches} batches "
        f"a pass; preparing {sizes.text_bytes:,} bytes of JSONL by {WORKERS} processes",
        "Grain's ConcatThenSplitIterDataset; datasets' load_dataset and map with the tokenizers library",
        ("grain", "array_record", "numpy", "tokenizers", "datasets", "pyarrow"),
    )
    with tempfile.TemporaryDirectory() as folder:
        inputs = make_inputs(Path(folder), sizes)
        result["results"] = {
            "packing": measure_packing(inputs, sizes, repeats, workers=0),
            f"packing, {WORKERS} workers": measure_packing(inputs, sizes, repeats, workers=WORKERS),
            "preparing": measure_preparing(inputs, repeats),
            "memory": measure_memory(inputs, sizes),
            "planning": measure_planning(sizes.planned, repeats),
        }
    return result


def make_inputs(folder: Path, sizes: Sizes) -> Inputs:
    """Write everything that is read into an existing folder."""
    names = ("tokenizer.json", "large.jsonl", "small.jsonl", "repeated.jsonl", "large", "small")
    inputs, texts = Inputs(folder, *(folder / name for name in names)), list(find_corpus(sizes.corpus).texts("train"))
    train_tokenizer(texts, sizes.vocab_size).save(inputs.tokenizer)
    write_lines(inputs.lines, texts, sizes.text_bytes)
    write_lines(inputs.few_lines, texts, sizes.text_bytes // sizes.growth)
    inputs.repeated_lines.write_bytes(inputs.few_lines.read_bytes() * sizes.growth)
    write_drawn(inputs.drawn, inputs.tokenizer, sizes.tokens, sizes.shards)
    write_drawn(inputs.few_drawn, inputs.tokenizer, sizes.tokens // sizes.growth, max(1, sizes.shards // sizes.growth))
    return inputs


def measure_packing(inputs: Inputs, sizes: Sizes, repeats: int, *, workers: int) -> dict[str, Any]:
    """Tokens a second of packing, where Grain has the best of the settings that are tried."""
    peer = functools.partial(_peer_packing, inputs, sizes)
    choices = [GrainSettings(threads) for threads in _THREADS]
    best, tried = _best(peer, choices, sizes)
    if workers:
        choices = [GrainSettings(best.threads, workers, buffer) for buffer in _BUFFERS]
        best, tried = _best(peer, choices, sizes)
    with (
        run_in_subprocess(our_packing, inputs.drawn, inputs.folder / "cache", sizes, workers, sizes.batches) as ours,
        run_in_subprocess(*peer(best, sizes.batches)) as theirs,
    ):
        passes = interleave({"ours": ours, "peer": theirs}, repeats)
    seconds = {name: timed.results for name, timed in passes.items()}  # without the start, which interleaving counts
    speeds = {name: sizes.pass_tokens / statistics.median(times) for name, times in seconds.items()}
    ratio = speeds["ours"] / speeds["peer"]
    print(f"packing, {workers} workers: ours {speeds['ours'] / 1e6:.1f} million tokens/s, "
          f"Grain {speeds['peer'] / 1e6:.1f} ({_said(best)}), ratio {ratio:.2f}", flush=True)  # fmt: skip
    return {
        "tokens_per_second": {name: round(speed) for name, speed in speeds.items()},
        "ratio": round(ratio, 3),
        "peer_settings": best._asdict(),
        "peer_settings_tried": [settings._asdict() | {"tokens_per_second": speed} for settings, speed in tried],
        "seconds": {name: rounded(times) for name, times in seconds.items()},
    }


def measure_preparing(inputs: Inputs, repeats: int) -> dict[str, Any]:
    """Megabytes of input a second, from a file of JSONL to what training reads."""
    size = inputs.lines.stat().st_size
    peer = (datasets_preparing, inputs.lines, inputs.tokenizer, WORKERS)
    with (
        run_in_subprocess(our_preparing, inputs.lines, inputs.tokenizer, inputs.folder, None) as ours,
        run_in_subprocess(*peer, False, inputs.folder) as theirs,
        run_in_subprocess(*peer, True, inputs.folder) as theirs_fast,
    ):
        passes = interleave({"ours": ours, "peer": theirs, "peer_fast": theirs_fast}, repeats)
    seconds = {name: timed.seconds for name, timed in passes.items()}
    seconds |= {f"{name}_map_alone": passes[name].results for name in ("peer", "peer_fast")}
    speeds = {name: size / 1e6 / statistics.median(times) for name, times in seconds.items()}
    ratios = {name: speeds["ours"] / speed for name, speed in speeds.items() if name != "ours"}
    print(f"preparing, {WORKERS} processes: ours {speeds['ours']:.2f} MB/s, datasets {speeds['peer']:.2f} "
          f"(its map alone {speeds['peer_map_alone']:.2f}), ratio {ratios['peer']:.2f}; with encode_batch_fast "
          f"{speeds['peer_fast']:.2f} ({speeds['peer_fast_map_alone']:.2f}), ratio {ratios['peer_fast']:.2f}",
          flush=True)  # fmt: skip
    return {
        "megabytes_per_second": {name: round(speed, 3) for name, speed in speeds.items()},
        "ratio": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "input_bytes": size,
        "seconds": {name: rounded(times) for name, times in seconds.items()},
    }


def measure_memory(inputs: Inputs, sizes: Sizes) -> dict[str, Any]:
    """Peak memory of preparing and of packing, for an input and for one that is larger by a factor."""
    sides = {
        "preparing": [
            (our_preparing, lines, inputs.tokenizer, inputs.folder, sizes.unit_bytes)
            for lines in (inputs.few_lines, inputs.repeated_lines)
        ],
        "packing": [
            (our_packing, drawn, inputs.folder / "cache", sizes, 0, sizes.batches)
            for drawn in (inputs.few_drawn, inputs.drawn)
        ],
    }
    results = {}
    for name, (smaller, larger) in sides.items():
        peaks = {}
        for key, side in (("smaller", smaller), ("larger", larger)):
            with run_in_subprocess(_measure_memory, *side) as measure:
                peaks[key] = measure()
        ratio = peaks["larger"] / peaks["smaller"]
        print(f"memory of {name}: {peaks['smaller'] / 1e6:.0f} MB, and {peaks['larger'] / 1e6:.0f} MB for "
              f"{sizes.growth} times the input, ratio {ratio:.2f}", flush=True)  # fmt: skip
        results[name] = {"peak_bytes": peaks, "ratio": round(ratio, 3)}
    return results


def our_packing(folder: Path, cache: Path, sizes: Sizes, workers: int, batches: int) -> Callable[[], float]:
    """A function that makes training batches of a prepared folder, and returns the seconds they took.

    Args:
      folder: a prepared one.
      cache: a folder for what opening it leaves.
      sizes: `context` and `batch` are used.
      workers: `data.workers`.
      batches: that are timed.
    """
    config = Config(
        ModelConfig(
            vocab_size=sizes.vocab_size, hidden_size=8, num_layers=1, num_query_heads=2, num_kv_heads=2, head_dim=4,
            num_experts=2, expert_size=8, router_size=4, max_positions=sizes.context,
        ),
        (PhaseConfig(tokens=2 * (_SKIPPED + batches) * sizes.batch * sizes.context),),
        data=DataConfig(sources=Table({"drawn": SourceConfig(path=str(folder))}), context=sizes.context,
                        cache_dir=str(cache), workers=workers),
        train=TrainConfig(batch=BatchConfig(tokens=sizes.batch * sizes.context)),
    )  # fmt: skip
    config.check()
    prepared = open_sources(config)

    def step() -> float:
        with train_batches(config, prepared) as iterator:
            return time_batches(iterator, _SKIPPED, batches)

    return step


def our_preparing(lines: Path, tokenizer: Path, scratch: Path, unit_bytes: int | None) -> Callable[[], float]:
    """A function that prepares JSONL in a fresh folder below `scratch`, and returns the seconds that took."""

    def step() -> float:
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            start = time.perf_counter()
            prepare([str(lines)], tokenizer, Path(folder) / "out", PrepareSettings(), workers=WORKERS,
                    unit_bytes=unit_bytes)  # fmt: skip
            return time.perf_counter() - start

    return step


def _peer_packing(inputs: Inputs, sizes: Sizes, settings: GrainSettings, batches: int) -> tuple[Any, ...]:
    """What `run_in_subprocess` takes."""
    return grain_packing, inputs.drawn, sizes.context, sizes.batch, settings, _SKIPPED, batches


def _best(
    peer: Callable[[GrainSettings, int], tuple[Any, ...]], choices: Sequence[GrainSettings], sizes: Sizes
) -> tuple[GrainSettings, list[tuple[GrainSettings, int]]]:
    """The fastest of the settings, and the tokens a second of each."""
    with ExitStack() as stack:
        sides = {
            str(i): stack.enter_context(run_in_subprocess(*peer(choice, sizes.tried)))
            for i, choice in enumerate(choices)
        }
        passes: list[Passes] = list(interleave(sides, _TRIES).values())
    tokens = sizes.tried * sizes.batch * sizes.context
    tried = [(choice, round(tokens / statistics.median(timed.results)))
             for choice, timed in zip(choices, passes, strict=True)]  # fmt: skip
    return max(tried, key=lambda settings_and_speed: settings_and_speed[1])[0], tried


def _measure_memory(make: Callable[..., Callable[[], Any]], *arguments: Any) -> Callable[[], int]:
    step = make(*arguments)

    def measure() -> int:
        with PeakMemory() as peak:
            step()
        return peak.bytes

    return measure


def _said(settings: GrainSettings) -> str:
    buffers = f", {settings.workers} workers that hold {settings.buffer} batches" if settings.workers else ""
    return f"{settings.threads} reading threads{buffers}"
