"""Time data loading against other projects: packing against Grain, preparation against `datasets`."""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.benchmark_command import command, medians
from benchmarks.data_peers import GrainSettings, datasets_preparing, grain_packing, time_batches
from zaya_jax.config import DataConfig, load_config
from zaya_jax.config.shipped import shipped
from zaya_jax.data.loading.batches import train_batches
from zaya_jax.data.loading.sources import open_sources
from zaya_jax.data.loading.text_corpus import find_corpus
from zaya_jax.data.prepare.preparation import PrepareSettings, prepare
from zaya_jax.data.readers.megatron import HEADER, MAGIC
from zaya_jax.data.tokenizer import load_tokenizer, train_tokenizer
from zaya_jax.lab.measure.timing import interleave_subprocesses
from zaya_jax.lab.result import describe_run, require_packages, rounded

WORKERS = 2

_THREADS = (0, 1, 2, 4, 16)  # numbers of Grain's reading threads to try
_BUFFERS = (1, 4, 16)  # sizes of its workers' buffers to try, in batches
_TRIES = 3  # passes with each setting
_MEDIAN, _SIGMA = 700, 1.1  # log-normal distribution of document lengths, in tokens
_SKIPPED = 50  # batches before timing; more than all buffers hold


@dataclass(frozen=True)
class Sizes:
    """Sizes of the inputs."""

    tokens: int = 20_000_000  # of the corpus to pack
    shards: int = 10
    context: int = 4096
    batch: int = 8
    batches: int = 1000  # of a timed pass
    tried: int = 200  # of a pass that tries a setting of Grain
    text_bytes: int = 40_000_000  # of the input to prepare
    vocab_size: int = 4096
    corpus: DataConfig = field(default_factory=DataConfig)  # the text to prepare

    @property
    def batch_tokens(self) -> int:
        """Number of tokens in a batch."""
        return self.batch * self.context


class Inputs(NamedTuple):
    """Paths of the inputs, all below one folder."""

    folder: Path
    tokenizer: Path
    lines: Path  # JSONL
    drawn: Path  # prepared folder of random documents


def run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Time packing against Grain, and data preparation against datasets.

    Uses generated documents and the Python standard library as input, with Grain's fastest settings.

    data --repeats 3 --output data.json
    """
    return bench_data(Sizes(), parsed.repeats)


def bench_data(sizes: Sizes, repeats: int) -> dict[str, Any]:
    """Time both sides, and print the speed of each and the relative speed; InputError if a peer is not installed."""
    require_packages("bench", "datasets")
    batches = f"batch {sizes.batch}, {sizes.batches} batches a pass"
    packed = f"packing {sizes.tokens:,} tokens in windows of {sizes.context}, {batches}"
    prepared = f"preparing {sizes.text_bytes:,} bytes of JSONL by {WORKERS} processes"
    peer = "Grain's ConcatThenSplitIterDataset; datasets' load_dataset and map with the tokenizers library"
    packages = ("grain", "array_record", "numpy", "tokenizers", "datasets", "pyarrow")
    result = describe_run("packing and preparing data", f"{packed}; {prepared}", peer, packages)
    with tempfile.TemporaryDirectory() as folder:
        inputs = make_inputs(Path(folder), sizes)
        result["results"] = {
            "packing": measure_packing(inputs, sizes, repeats, workers=0),
            f"packing, {WORKERS} workers": measure_packing(inputs, sizes, repeats, workers=WORKERS),
            "preparing": measure_preparing(inputs, repeats),
        }
    return result


def make_inputs(folder: Path, sizes: Sizes) -> Inputs:
    """Write all inputs into an existing folder."""
    inputs = Inputs(folder, *(folder / name for name in ("tokenizer.json", "lines.jsonl", "drawn")))
    texts = list(find_corpus(sizes.corpus).texts("train"))
    train_tokenizer(texts, sizes.vocab_size).save(inputs.tokenizer)
    write_lines(inputs.lines, texts, sizes.text_bytes)
    write_drawn(inputs.drawn, inputs.tokenizer, sizes.tokens, sizes.shards)
    return inputs


def measure_packing(inputs: Inputs, sizes: Sizes, repeats: int, *, workers: int) -> dict[str, Any]:
    """Measure tokens/s of packing, with the fastest of Grain's settings."""
    tried = grain_speeds(inputs, sizes, [GrainSettings(threads) for threads in _THREADS])
    best = max(tried, key=tried.__getitem__)
    if workers:
        tried = grain_speeds(inputs, sizes, [GrainSettings(best.threads, workers, buffer) for buffer in _BUFFERS])
        best = max(tried, key=tried.__getitem__)
    ours = our_packing, inputs.drawn, inputs.folder / "cache", sizes, workers
    passes = interleave_subprocesses({"ours": ours, "peer": _grain(inputs, sizes, best, sizes.batches)}, repeats)
    seconds = {name: timed.results for name, timed in passes.items()}  # without start-up, unlike `timed.seconds`
    speeds = {name: sizes.batches * sizes.batch_tokens / each for name, each in medians(seconds).items()}
    ratio = speeds["ours"] / speeds["peer"]
    buffers = f", {best.workers} workers with buffers of {best.buffer}" if best.workers else ""
    peer = f"Grain {speeds['peer'] / 1e6:.1f} ({best.threads} reading threads{buffers})"
    text = f"zaya_jax {speeds['ours'] / 1e6:.1f} million tokens/s, {peer}; zaya_jax is {ratio:.2f}× as fast"
    print(f"packing, {workers} workers: {text}", flush=True)
    rows = [settings._asdict() | {"tokens_per_second": speed} for settings, speed in tried.items()]
    result = {"tokens_per_second": {name: round(speed) for name, speed in speeds.items()}, "ratio": round(ratio, 3)}
    result |= {"peer_settings": best._asdict(), "peer_settings_tried": rows}
    return result | {"seconds": {name: rounded(times) for name, times in seconds.items()}}


def measure_preparing(inputs: Inputs, repeats: int) -> dict[str, Any]:
    """Measure MB/s of input, from JSONL to what training reads."""
    size = inputs.lines.stat().st_size
    sides: dict[str, tuple[Any, ...]] = {"ours": (our_preparing, inputs.lines, inputs.tokenizer, inputs.folder)}
    for name, fast in (("peer", False), ("peer_fast", True)):
        sides[name] = datasets_preparing, inputs.lines, inputs.tokenizer, WORKERS, fast, inputs.folder
    passes = interleave_subprocesses(sides, repeats)
    seconds = {name: timed.seconds for name, timed in passes.items()}
    seconds |= {f"{name}_map_alone": passes[name].results for name in ("peer", "peer_fast")}
    speeds = {name: size / 1e6 / each for name, each in medians(seconds).items()}
    ratios = {name: speeds["ours"] / speed for name, speed in speeds.items() if name != "ours"}
    print(f"preparing, {WORKERS} processes: zaya_jax {speeds['ours']:.2f} MB/s", flush=True)
    for name, what in (("peer", "datasets"), ("peer_fast", "datasets with encode_batch_fast")):
        alone = f"({speeds[f'{name}_map_alone']:.2f} without loading the JSONL)"
        print(f"  {what} {speeds[name]:.2f} MB/s {alone}; zaya_jax is {ratios[name]:.2f}× as fast", flush=True)
    return {
        "megabytes_per_second": {name: round(speed, 3) for name, speed in speeds.items()},
        "ratio": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "input_bytes": size,
        "seconds": {name: rounded(times) for name, times in seconds.items()},
    }


def our_packing(folder: Path, cache: Path, sizes: Sizes, workers: int) -> Callable[[], float]:
    """Make a function that makes training batches from a prepared folder, and returns the seconds they took."""
    overrides = (
        f"model.vocab_size={sizes.vocab_size} model.hidden_size=8 model.num_layers=1 model.head_dim=4 "
        "model.num_kv_heads=2 model.num_experts=2 model.expert_size=8 model.router_size=4 "
        f"model.max_positions={sizes.context} data.context={sizes.context} data.workers={workers} "
        f"phases.0.tokens={2 * (_SKIPPED + sizes.batches) * sizes.batch_tokens} train.batch.tokens={sizes.batch_tokens}"
    )
    paths = [f"data.sources.drawn.path={folder}", f"data.cache_dir={cache}"]
    config = load_config(shipped("tiny.yaml"), [*overrides.split(), "phases.0.schedule=null", *paths])
    prepared = open_sources(config)

    def step() -> float:
        with train_batches(config, prepared) as iterator:
            return time_batches(iterator, _SKIPPED, sizes.batches)

    return step


def our_preparing(lines: Path, tokenizer: Path, scratch: Path) -> Callable[[], None]:
    """Make a function that prepares JSONL in a new folder below `scratch`."""

    def step() -> None:
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            prepare([str(lines)], tokenizer, Path(folder) / "out", PrepareSettings(), workers=WORKERS)

    return step


def grain_speeds(inputs: Inputs, sizes: Sizes, candidates: Sequence[GrainSettings]) -> dict[GrainSettings, int]:
    """Return tokens/s with each of Grain's settings."""
    sides = {settings: _grain(inputs, sizes, settings, sizes.tried) for settings in candidates}
    passes, tokens = interleave_subprocesses(sides, _TRIES), sizes.tried * sizes.batch_tokens
    return {settings: round(tokens / statistics.median(timed.results)) for settings, timed in passes.items()}


def _grain(inputs: Inputs, sizes: Sizes, settings: GrainSettings, batches: int) -> tuple[Any, ...]:
    return grain_packing, inputs.drawn, sizes.context, sizes.batch, settings, _SKIPPED, batches


# --- the inputs -------------------------------------------------------------------------------------------------


def write_lines(path: Path, texts: Sequence[str], size: int) -> None:
    """Write JSONL of at least `size` bytes: all texts in random order, repeated as often as needed."""
    rng, left = np.random.default_rng(0), size
    with path.open("wb") as file:
        while left > 0:
            for index in rng.permutation(len(texts)):
                left -= file.write(json.dumps({"text": texts[index]}).encode() + b"\n")
                if left <= 0:
                    break


def write_drawn(folder: Path, tokenizer: Path, tokens: int, shards: int) -> None:
    """Prepare a new folder of random documents, with log-normal lengths and Zipf-distributed tokens, in equal shards.

    A Megatron dataset next to it has at least so many tokens of the vocabulary of a `tokenizer.json`.
    """
    loaded, rng, dataset = load_tokenizer(tokenizer), np.random.default_rng(0), folder.with_suffix(".bin")
    frequency = 1 / np.arange(2, loaded.vocab_size + 2)
    frequency[loaded.eot] = 0
    steps, lengths = np.cumsum(frequency), rng.lognormal(np.log(_MEDIAN), _SIGMA, 10 + tokens // _MEDIAN)
    lengths = np.maximum(lengths, 1).astype(np.int32)
    lengths = lengths[: 1 + np.searchsorted(np.cumsum(lengths), tokens)]
    np.searchsorted(steps, steps[-1] * rng.random(lengths.sum()), side="right").astype(np.int32).tofile(dataset)
    documents, starts = np.arange(len(lengths) + 1), 4 * (np.cumsum(lengths, dtype=np.int64) - lengths)
    header = HEADER.pack(MAGIC, 1, 4, len(lengths), len(documents))  # 4: int32
    parts = (lengths.tobytes(), starts.tobytes(), documents.tobytes())
    folder.with_suffix(".idx").write_bytes(header + b"".join(parts))
    size = -(-dataset.stat().st_size // shards)
    prepare([str(dataset)], tokenizer, folder, PrepareSettings(), unit_bytes=size, workers=1)


main = command(run, {}, repeats=5)
