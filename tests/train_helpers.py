"""Runs small enough for tests: their configuration, corpus and compiled steps."""

import dataclasses
import functools
import inspect
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import yaml

from tests.config_helpers import changed as change  # noqa: F401 (tests of training find these here)
from tests.devices_helpers import ROOT, on_devices  # noqa: F401
from tests.helpers import jit as fast_jit
from zaya_jax.checkpoint.restore import read_checkpoint
from zaya_jax.config import (
    AdamWConfig,
    BalanceConfig,
    BatchConfig,
    Config,
    DataConfig,
    LoraConfig,
    ModelConfig,
    MuonConfig,
    OptimizerConfig,
    PhaseConfig,
    ScheduleConfig,
    SourceConfig,
    SpikeConfig,
    Table,
    TrainConfig,
    load_config,
)
from zaya_jax.config.stages import BatchStage, stages
from zaya_jax.parallel.mesh import replicated
from zaya_jax.run.checkpoints import CHECKPOINTS
from zaya_jax.train import compiled, initialization, resumption, trainer
from zaya_jax.train import program as program_module
from zaya_jax.train.fit import TrainResult, run_training
from zaya_jax.train.program import PhaseProgram, Programs, make_programs
from zaya_jax.train.state import TrainState, init_counters, init_state
from zaya_jax.train.step import Batch

MODEL = ModelConfig(
    vocab_size=300, hidden_size=16, num_layers=2, num_query_heads=2, num_kv_heads=1, head_dim=8, num_experts=4,
    expert_size=16, router_size=8, max_positions=64, rope_base=1.0e4,
)  # fmt: skip
# Its rates fall to a twentieth at the last step, so that a step can be a large or a small one in one compiled function.
RATES = OptimizerConfig(
    muon=MuonConfig(learning_rate=0.01, newton_schulz_dtype="float32"), adamw=AdamWConfig(learning_rate=0.01)
)
FALLING = ScheduleConfig(final=0.05)
CONFIG = Config(
    MODEL, (PhaseConfig(tokens=100 * 8 * 32, schedule=FALLING),), data=DataConfig(context=32), optimizer=RATES,
    train=TrainConfig(batch=BatchConfig(tokens=8 * 32, micro_batch=4)),
)  # fmt: skip
# Fewer kinds of parameters, which compile in half the time; `transformers` has no form of it.
PLAIN = {"attention": "gqa", "router": "linear", "residual_scaling": False}
STEADY = ScheduleConfig("constant", warmup_tokens=256)
# What runs of `small_run` compile, so that tests of a step and of runs share it.
STEP = dataclasses.replace(
    CONFIG, phases=(PhaseConfig(tokens=128, schedule=STEADY),),
    train=TrainConfig(batch=BatchConfig(tokens=4 * 32, micro_batch=2)),
)  # fmt: skip
# What runs of adapters compile in tests/train/test_finetune.py, so that tests of a step share it.
ADAPTERS = Config(
    dataclasses.replace(MODEL, **PLAIN, max_positions=128),
    (PhaseConfig(tokens=128, name="chat", schedule=ScheduleConfig("constant")),),
    data=DataConfig(context=96, sources=Table({"talk": SourceConfig("talk")})), lora=LoraConfig(4, 8.0),
    optimizer=OptimizerConfig(
        matrices="adamw", balance=BalanceConfig(rule="none"), adamw=AdamWConfig(learning_rate=0.05, weight_decay=0.0)
    ),
    train=TrainConfig(batch=BatchConfig(tokens=4 * 96), spike=SpikeConfig(window=0)), init_from="a run",
)  # fmt: skip


# --- one step --------------------------------------------------------------------------------------------------


def make_program(config: Config, devices: int = 1) -> PhaseProgram:
    """The program of the first phase on the first `devices` devices."""
    return make_programs(config, jax.devices()[:devices])[0]


class Setup(NamedTuple):
    config: Config
    program: PhaseProgram
    state: TrainState
    step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]
    compiled: jax.stages.Compiled


@functools.cache
def setup(config: Config = STEP) -> Setup:
    """What one step needs, on one device, as runs of `small_run` have it; the arrays are not donated."""
    with pytest.MonkeyPatch.context() as patch:
        compile_once(patch)
        program = _shared(make_program(config))
        compiled_step = program.compile(stages(config)[0])
    return Setup(config, program, start(config), lambda state, batch: compiled_step(state, batch, {}), compiled_step)


def make_batch(config: Config = CONFIG, seed: int = 0) -> dict[str, np.ndarray]:
    """Packed rows whose counts of real tokens differ widely, and padding; leaves [micro-batches, sequences, s]."""
    rng = np.random.default_rng(seed)
    first = stages(config)[0]
    b, s = first.sequences, first.context
    text = rng.integers(0, config.model.vocab_size, (b, s + 1))
    starts, place = rng.random((b, s)) < 0.1, np.arange(s)
    segments = np.cumsum(starts, -1) + 1
    positions = place - np.maximum.accumulate(np.where(starts, place, 0), -1)
    mask = ~np.roll(starts, -1, -1)
    for row in range(b):
        end = s - row * s // (b + 1)
        segments[row, end:] = positions[row, end:] = 0
        mask[row, end - 1 :] = False
    batch = {"tokens": text[:, :-1], "targets": text[:, 1:], "segment_ids": segments, "positions": positions}
    batch = {name: array.astype(np.int32) for name, array in batch.items()} | {"loss_mask": mask}
    return {name: micro(array, b // (config.train.batch.micro_batch or b)) for name, array in batch.items()}


def micro(array: np.ndarray, count: int) -> np.ndarray:
    """[sequences, …] as [count, sequences / count, …]."""
    return array.reshape(count, -1, *array.shape[1:])


def placed_step(program: PhaseProgram, jit: Callable[..., Any] = fast_jit) -> tuple[Any, dict[str, jax.Array]]:
    """The training step of a program over devices, and `make_batch` where it lies there."""
    batch, placement = make_batch(program.config), program.placement
    rows = {name: array.reshape(-1, array.shape[-1]) for name, array in batch.items()}
    out = placement.shardings(program.abstract_state), replicated(placement.mesh)
    return jit(program.train_step, out_shardings=out), placement.place(rows, len(batch["tokens"]))


def leaves(tree: Any) -> dict[str, np.ndarray]:
    """Copies of all leaves by path, keys as their data."""

    def plain(leaf: Any) -> np.ndarray:
        is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.array(jax.random.key_data(leaf) if is_key else leaf)

    return {jax.tree_util.keystr(path): plain(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


def differing(first: Any, second: Any) -> list[str]:
    """Paths of the leaves that are not bitwise equal."""
    left, right = leaves(first), leaves(second)
    assert left.keys() == right.keys()
    return [name for name, x in left.items() if (x.dtype, x.tobytes()) != (right[name].dtype, right[name].tobytes())]


# --- whole runs ------------------------------------------------------------------------------------------------

WORDS = "the model reads one token then writes another while experts wait for balance".split()  # noqa: SIM905 (a sentence)


def write_corpus(root: Path, files: int = 14, seed: int = 0) -> Path:
    """Text files of made-up sentences."""
    rng = random.Random(seed)
    root.mkdir(parents=True, exist_ok=True)
    for index in range(files):
        lines = [" ".join(rng.choices(WORDS, k=8)) for _ in range(6 + index % 5)]
        (root / f"{index}.txt").write_text("\n".join(lines) + ".\n", encoding="utf-8")
    return root


def run_tree(folder: Path, run: str = "run") -> dict[str, Any]:
    """The configuration of a small run, as in YAML: its corpus, cache and run folder lie in `folder`."""
    return {
        "run_dir": str(folder / run),
        "model": dataclasses.asdict(MODEL) | {"layer_pattern": ["full"]},
        "data": {"corpus": str(folder / "corpus"), "suffixes": [".txt"], "heldout_fraction": 0.3,
                 "cache_dir": str(folder / "cache"), "context": 32},
        "phases": [{"tokens": 12 * 128, "schedule": {"shape": "constant", "warmup_tokens": 256}}],
        "optimizer": {"adamw": {"learning_rate": 0.01},
                      "muon": {"learning_rate": 0.01, "newton_schulz_dtype": "float32"}},
        "train": {"batch": {"tokens": 128, "micro_batch": 2}, "log_every": 4},
        "evaluation": {"every": 6, "batches": 1, "batch_size": 2},
        "checkpoint": {"every": 5, "keep": 2},
        "sample": {"prompt": "the model", "tokens": 8},
    }  # fmt: skip


def write_run(folder: Path, run: str = "run") -> Path:
    """A corpus and a configuration in `folder`; the path of the latter."""
    write_corpus(folder / "corpus")
    path = folder / f"{run}.yaml"
    path.write_text(yaml.safe_dump(run_tree(folder, run)), encoding="utf-8")
    return path


def small_run(folder: Path, *overrides: str, run: str = "run") -> Config:
    """The configuration of a small run whose corpus has been written."""
    return load_config(write_run(folder, run), overrides)


def shortened(config: Config, steps: int) -> Config:
    """The configuration with one phase of so many steps."""
    (phase,) = config.phases
    return dataclasses.replace(config, phases=(dataclasses.replace(phase, tokens=steps * config.train.batch.tokens),))


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every file below `folder` with its content, every folder with None, but for locks and who trained."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if not path.name.endswith((".lock", "status.json"))
    }


def compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all runs of one shape in this process share their compiled functions and the drawn start.

    Nothing is donated, and `loss.png` holds what would be drawn. What is compiled and donated, and when, is left to the
    tests that start `python -m zaya_jax.main`.
    """

    class Jax:
        jit = staticmethod(_jit)

        def __getattr__(self, name: str) -> Any:
            return getattr(jax, name)

    class Drawn(Jax):
        jit = staticmethod(_drawn)

    monkeypatch.setattr(initialization, "jax", Drawn())
    monkeypatch.setattr(resumption, "jax", Jax())
    monkeypatch.setattr(compiled, "jax", Jax())
    monkeypatch.setattr(program_module, "jax", Jax())
    monkeypatch.setattr(PhaseProgram, "compile", _compiled_step)
    monkeypatch.setattr(PhaseProgram, "evaluation_step", property(lambda program: _evaluation_step(_shared(program))))
    monkeypatch.setattr(PhaseProgram, "abstract_state", property(lambda program: _abstract_state(_shared(program))))
    monkeypatch.setattr(initialization, "init_state", lambda program: start(program.config))
    monkeypatch.setattr(trainer, "plot_run", _plot_run)
    for function in (resumption.to_yaml, resumption.versions):  # slow, and asked for at each checkpoint
        monkeypatch.setattr(resumption, function.__name__, functools.cache(function))


_MOVED = ("params", "balance", "opt_state", "balance_state")


@functools.cache
def _little_step(num_layers: int, sources: int) -> Callable:
    layers = np.zeros(num_layers, np.float32)

    def move(x: jax.Array, by: jax.Array) -> jax.Array:
        return x + by.astype(x.dtype) if jax.numpy.issubdtype(x.dtype, jax.numpy.floating) else x

    @jax.jit
    def step(state: TrainState, batch: Batch, base: Any) -> tuple[TrainState, dict[str, Any]]:
        del base
        by = 1e-3 + batch["tokens"].mean() / 1e5
        moved = {kind: jax.tree.map(lambda x: move(x, by), getattr(state, kind)) for kind in _MOVED}
        metrics = {"loss": 9.0 / (1 + jax.tree.leaves(moved["params"])[0].mean()), "grad_norm": 1.0,
                   "learning_rate": 0.5, "tokens": batch["loss_mask"].sum(), "skipped": 0, "skip": 0,
                   "expert_counts": layers[:, None], "load_entropy": layers, "max_load": layers, "skip_rate": layers,
                   "bias_range": layers, "grad_norm_by_role": {"matrix": 1.0},
                   "update_norm_by_role": {"matrix": 0.5}}  # fmt: skip
        if "sources" in batch:
            read = (batch["sources"][..., None] == np.arange(sources)) & batch["loss_mask"][..., None]
            tokens = read.sum((0, 1, 2))
            metrics |= {"source_loss": metrics["loss"] * tokens, "source_tokens": tokens}
        return dataclasses.replace(state, step=state.step + 1, **moved), metrics

    return step


def compute_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps move all state by what tells batches apart, where only what is read, kept and written matters."""

    def zeros(program: PhaseProgram) -> TrainState:
        state = program.abstract_state
        drawn = {kind: jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), getattr(state, kind)) for kind in _MOVED}
        return TrainState(**drawn, **init_counters(program.config))

    def sums(params: dict[str, jax.Array], balance: Any, batch: Batch, **_: Any) -> dict[str, np.ndarray]:
        tokens, mask = (np.asarray(batch[name]) for name in ("tokens", "loss_mask"))
        return {"loss": np.asarray(jax.tree.leaves(params)[0]).mean() + tokens.sum(), "tokens": np.float32(mask.sum())}

    compile_once(monkeypatch)
    monkeypatch.setattr(PhaseProgram, "compile", lambda program, _: _little_step(
        program.config.model.num_layers, len(program.config.data.source_names)))  # fmt: skip
    monkeypatch.setattr(compiled, "check_compiled", lambda *_: None)
    monkeypatch.setattr(compiled.CompiledSteps, "evaluation", lambda *_: sums)
    monkeypatch.setattr(initialization, "init_state", zeros)


def trained(config: Config) -> tuple[Config, TrainResult]:
    """A configuration and what its run gives, see `compile_once`."""
    with pytest.MonkeyPatch.context() as patch:
        compile_once(patch)
        return config, run_training(config)


_cached_jit = functools.cache(fast_jit)


def _jit(function: Callable, donate_argnums: Any = None, **options: Any) -> Any:
    """One for each function; what has options, which cannot be compared, is drawn once anyway."""
    return fast_jit(function, **options) if options else _cached_jit(function)


def _drawn(function: Callable, **options: Any) -> Any:
    """A start that has been drawn before needs no compilation."""
    return fast_jit(function, **options) if inspect.signature(function).parameters else function


def _same_step(config: Config) -> Config:
    """`config` without what no compiled function depends on."""
    train = dataclasses.replace(config.train, max_skipped_steps=10, log_every=10)
    sources = {name: SourceConfig(name) for name in config.data.sources}
    data = DataConfig(context=config.data.context, sources=Table(sources))
    phases = tuple(dataclasses.replace(phase, mixture=Table(), template=None, packing="windows", over_length="split")
                   for phase in config.phases)  # fmt: skip
    schedule = phases[0].schedule
    if len(phases) == 1 and schedule and schedule.shape == "constant":  # whose steps are alike, however many
        phases = (dataclasses.replace(phases[0], tokens=STEP.phases[0].tokens),)
    return Config(config.model, phases, lora=config.lora, optimizer=config.optimizer, train=train, data=data)


def _same_start(config: Config) -> Config:
    return dataclasses.replace(_same_step(config), seed=config.seed, start_phase=config.start_phase)


@functools.cache
def _shared_programs(config: Config) -> Programs:
    return make_programs(config)


def _shared(program: PhaseProgram) -> PhaseProgram:
    """The program that all runs of this shape use."""
    programs, phases = _shared_programs(_same_step(program.config)), range(len(program.config.phases))
    same = program.model.config, program.placement, program.remat
    return next(one for one in map(programs.__getitem__, phases)
                if (one.model.config, one.placement, one.remat) == same)  # fmt: skip


_abstract_state = functools.cache(PhaseProgram.__dict__["abstract_state"].func)
_evaluation_step = functools.cache(PhaseProgram.__dict__["evaluation_step"].func)
_compile = PhaseProgram.compile
_compiled: dict[Any, Callable] = {}


def _compiled_step(program: PhaseProgram, stage: BatchStage) -> Callable:
    key = _shared(program), program.batch_shape(stage)
    if key not in _compiled:
        _compiled[key] = _compile(key[0], stage)
    return _compiled[key]


@functools.cache
def _start_arrays(config: Config) -> TrainState:
    program = make_programs(config)[0]
    return fast_jit(lambda: init_state(program))()


def start(config: Config) -> TrainState:
    """The state before the first step, drawn once for all runs of this shape and seed."""
    return _start_arrays(_same_start(config))


def _plot_run(rows: list[dict[str, Any]], path: Path, compressors: dict[str, float]) -> None:
    """Write what would be drawn: a picture takes longer than all steps of a small run."""
    path.write_text(json.dumps([rows, compressors]), encoding="utf-8")


def restore(config: Config, step: int) -> tuple[TrainState, Any]:
    """The state and the position in the data in the checkpoint of `step` of the run of `config`."""
    abstract = make_program(config).abstract_state
    result = read_checkpoint(Path(config.run_dir) / CHECKPOINTS / str(step), lambda manifest: abstract)
    return result.state, result.manifest.metadata["data"]
