"""The schema of a configuration: one frozen dataclass per section.

Field names are the YAML keys; a field without a default is required. Each section's `check` validates that section,
`Config.check` validates combinations of sections. Both raise `InputError`.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from zaya_jax.config.bounds import NonNegative, Positive, check_bounds
from zaya_jax.config.checks import field_check, item_keys, require, require_path
from zaya_jax.config.data import DataConfig
from zaya_jax.config.model import ModelConfig
from zaya_jax.config.optimizer import ComputeDtype, LoraConfig, Matrices, OptimizerConfig
from zaya_jax.config.parallel import ParallelConfig
from zaya_jax.config.phases import BatchConfig, PhaseConfig, Remat
from zaya_jax.config.table import Table
from zaya_jax.config.weight_source import HF, hf_folder
from zaya_jax.errors import InputError
from zaya_jax.hardware.presets import PRESETS, PresetName

SinkName = Literal["tensorboard", "wandb"]
Verify = Literal["none", "hash", "readback"]
MAX_PHASES = 1000


@dataclass(frozen=True)
class SpikeConfig:
    """Skip steps whose loss or gradient norm is far above that of the steps before.

    A value is a spike if it exceeds the median of the window by more than `threshold` robust standard deviations
    (1.4826 × the median absolute deviation).
    """

    window: NonNegative[int] = 128  # previous steps compared with, of the same phase and not skipped; 0 disables
    threshold: Positive[float] = 10.0  # robust standard deviations above the median


@dataclass(frozen=True)
class TrainConfig:
    """The training step."""

    batch: BatchConfig = field(default_factory=BatchConfig)  # default of all phases
    compute_dtype: ComputeDtype = "float32"  # dtype of matrix products; float64 needs JAX_ENABLE_X64=1
    remat: Remat = "none"  # what the backward pass recomputes; dots: all but matmuls; full: everything
    # on GPUs: no operation whose result may vary, and XLA's first algorithm instead of the one that is fastest here
    deterministic: bool = False
    spike: SpikeConfig = field(default_factory=SpikeConfig)
    max_skipped_steps: Positive[int] = 10  # skipped steps in a row that stop the run
    log_every: Positive[int] = 10  # steps between console lines
    sinks: tuple[SinkName, ...] = ()  # where metrics are written besides metrics.jsonl; each is an extra to install


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out evaluation, on the same batches throughout the run."""

    every: Positive[int] = 100  # steps between evaluations
    batches: Positive[int] = 8  # maximum number of batches per source, spread over its held-out text
    batch_size: Positive[int] = 16  # sequences per batch
    # evaluations of a phase in a row without a new lowest held-out loss after which the run ends; 0: never
    patience: NonNegative[int] = 0


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoint interval, verification and retention."""

    every: Positive[int] = 100  # steps between checkpoints
    keep: Positive[int] = 2  # number of newest checkpoints to keep
    keep_every: Positive[int] | None = None  # also keep checkpoints at multiples of this many steps
    keep_best: NonNegative[int] = 0  # also keep this many with the lowest held-out loss
    verify: Verify = "hash"  # how saves are checked; hash: by checksums on restoring; readback: also read back
    max_unsaved_seconds: Positive[float] = 3600.0  # stop the run when saves have failed for this long
    local_dir: str | None = None  # node-local folder for a copy of the newest checkpoint, restored first

    def check(self) -> None:
        """Raise `InputError` if a value is out of range."""
        allowed = "null if checkpoint.verify is none: local copies need checksums"
        field_check(self, "checkpoint")("local_dir", self.local_dir is None or self.verify != "none", allowed)
        require_path("checkpoint.local_dir", self.local_dir)


@dataclass(frozen=True)
class SampleConfig:
    """The sample of text generated at the end of a run, and during it."""

    prompt: str = "def "  # text that the sample continues
    # maximum length of the sample in tokens; 0 disables it (a sample needs all parameters in fp32 on one device)
    tokens: NonNegative[int] = 96
    temperature: float = 0.8  # at least 0; 0 picks the most likely token
    every: NonNegative[int] = 0  # steps between samples during training; 0: only one at the end

    def check(self) -> None:
        """Raise `InputError` if a value is out of range."""
        must = field_check(self, "sample")
        must("every", not self.every or self.tokens > 0, "0 if sample.tokens is 0, which disables samples")
        must("prompt", len(self.prompt) > 0, "at least one character long")
        must("prompt", not any(0xD800 <= ord(c) < 0xE000 for c in self.prompt), "text without lone surrogates")
        must("temperature", self.temperature >= 0, "at least 0 (0 picks the most likely token)")


@dataclass(frozen=True)
class ProfileConfig:
    """A profiler trace of some steps, which `python -m zaya_jax.machine step RUN_DIR` reads."""

    start: Positive[int]  # the first step to trace; the first of a run is 1
    steps: Positive[int] = 3  # number of steps; fewer if an evaluation, a save or another batch size comes first


@dataclass(frozen=True)
class Config:
    """The configuration of a run."""

    model: ModelConfig
    phases: tuple[PhaseConfig, ...]  # the phases in order; optimizer state and data positions carry over
    run_dir: str = "runs/run"  # folder for everything that the run writes; rerunning the command resumes from it
    preset: PresetName | None = None  # XLA flags and timeouts of a kind of machine; null: that of the detected GPU
    # Folder with results of `python -m zaya_jax.machine` on this machine: a result of collectives sets the sizes up to
    # which the preset combines messages.
    measurements: str | None = None
    seed: int = 0  # seed of initialization, data order and sampling; at least 0
    # Initial parameters and optimizer state: RUN_DIR, RUN_DIR@PHASE, RUN_DIR/checkpoints/STEP, or hf:FOLDER (parameters
    # only).
    init_from: str | None = None
    # Run to continue in a new run_dir, with its complete state and position: as init_from, without hf:FOLDER.
    resume_from: str | None = None
    lora: LoraConfig | None = None  # train adapters on the parameters of init_from; null: train all parameters
    start_phase: str | None = None  # name of the phase to start with; null: the first
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    # Implementations of operations, by name, instead of the fastest measured ones: `attention: reference`.
    ops: Table[str] = field(default_factory=Table[str])
    parallel: ParallelConfig = field(default_factory=ParallelConfig)  # default of all phases
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    profile: ProfileConfig | None = None  # steps to trace into run_dir/profile; null: none

    def check(self) -> None:
        """Raise `InputError` if a section or a combination of sections is invalid."""
        if not 0 < len(self.phases) <= MAX_PHASES:
            raise InputError(f"phases has {len(self.phases)} items, but must have between 1 and {MAX_PHASES:,}.")
        check_bounds(self)
        for section in (self.model, self.data, self.checkpoint, self.sample):
            section.check()
        self.train.batch.check("train.batch")
        sinks, prompt = self.train.sinks, self.sample.prompt
        require(len({*sinks}) == len(sinks), "train.sinks", sinks, "a list that names each sink once")
        must = field_check(self, "")
        must("seed", 0 <= self.seed < 2**31, "at least 0 and below 2147483648")
        must("preset", self.preset is None or self.preset in PRESETS, f"null or one of {', '.join(PRESETS)}")
        require_path("run_dir", self.run_dir, "the path of a folder")
        require_path("measurements", self.measurements, "null or the path of a folder")
        self._check_weights()
        longest = self.model.max_positions
        fits = f"at most model.max_positions ({longest})"
        require(self.data.context <= longest, "data.context", self.data.context, fits)
        # A prompt has at most as many tokens as bytes, with any tokenizer.
        allowed = f"at most {longest - 2} bytes long (model.max_positions - 2)"
        require(1 + len(prompt.encode()) < longest, "sample.prompt", prompt, allowed)
        for index, phase in enumerate(self.phases):
            phase.check(self.phase_key(index))
        names, sources = [phase.name for phase in self.phases], self.data.source_names
        for index, phase in enumerate(self.phases):
            phase_key, context = self.phase_key(index), self.context_for(phase)
            require(phase.name not in names[:index], f"{phase_key}.name", phase.name, "unique among the phases")
            require(context <= longest, f"{phase_key}.context", context, fits)
            for source in phase.mixture:
                known = f"a configured source: {', '.join(sources)}"
                require(source in sources, f"{phase_key}.mixture", source, known)
            context_key = "data.context" if phase.context is None else f"{phase_key}.context"
            self._check_batch(phase, phase_key, context_key)
            self.parallel_for(phase).check(self.parallel_key(phase), self.model, {context_key: context})
        is_phase = self.start_phase is None or self.start_phase in names
        must("start_phase", is_phase, f"one of {', '.join(names)}")
        self._check_schedules()

    def _check_weights(self) -> None:
        must, checkpoint = field_check(self, ""), "the path of a run or a checkpoint"
        if self.init_from is not None:
            folder = hf_folder(self.init_from)
            path = self.init_from if folder is None else folder
            must("init_from", path != "", f"{checkpoint}, or {HF}FOLDER")
            require_path("init_from", path.rpartition("@")[0] or path)
        if self.resume_from is not None:
            require_path("resume_from", self.resume_from.rpartition("@")[0] or self.resume_from, checkpoint)
            starts = "init_from starts a new run from its parameters and optimizer state"
            continues = "resume_from continues another run with its complete state and position"
            null = f"null if init_from is set (it is {self.init_from!r}): {continues}, {starts}"
            must("resume_from", self.init_from is None, null)
            complete = f"a run or a checkpoint: {HF}FOLDER has no optimizer state to resume; use init_from"
            must("resume_from", hf_folder(self.resume_from) is None, complete)
        has_base = self.lora is None or self.init_from is not None
        must("init_from", has_base, "set if lora is set: adapters modify an existing model")

    def _check_batch(self, phase: PhaseConfig, phase_key: str, context_key: str) -> None:
        batch, context, key = self.batch_for(phase), self.context_for(phase), self.batch_key(phase)
        must, rule = field_check(batch, key), f"a multiple of {context_key} ({context}): a step consists of whole rows"
        for index, size in enumerate(batch.stepped):
            require(size.tokens % context == 0, f"{key}.stepped.{index}.tokens", size.tokens, rule)
        must("tokens", batch.tokens % context == 0, rule)
        must("start", (batch.start or 0) % context == 0, rule)
        for _, tokens in batch.sizes():
            rows = tokens // context
            divides = batch.micro_batch is None or rows % batch.micro_batch == 0
            must("micro_batch", divides, f"a divisor of the {rows} sequences per step of {phase_key}")

    def _check_schedules(self) -> None:
        """Reject a warm-up or a decay longer than the phases that its schedule spans."""
        for first, after in self.schedule_phases():
            schedule = self.phases[first].schedule
            if schedule is None:
                continue
            budget, warmup = sum(phase.tokens for phase in self.phases[first:after]), schedule.warmup_tokens
            must, rest = field_check(schedule, f"{self.phase_key(first)}.schedule"), budget - warmup
            must("warmup_tokens", rest >= 0, f"at most {budget:,}, the tokens of the phases that the schedule spans")
            spans = f"the schedule spans {budget:,} tokens, and its warm-up takes {warmup:,}"
            must("decay_tokens", (schedule.decay_tokens or 0) <= rest, f"at most {rest:,}: {spans}")

    def phase_key(self, index: int) -> str:
        """Return the key of a phase for messages: by its name, or by its index if the name is not unique."""
        return item_keys("phases", [phase.name for phase in self.phases])[index]

    def batch_key(self, phase: PhaseConfig) -> str:
        """Return the key that sets the batch size of `phase`."""
        return "train.batch" if phase.batch is None else f"{self.phase_key(self.phases.index(phase))}.batch"

    def parallel_key(self, phase: PhaseConfig) -> str:
        """Return the key that sets the parallel layout of `phase`."""
        return "parallel" if phase.parallel is None else f"{self.phase_key(self.phases.index(phase))}.parallel"

    def schedule_phases(self) -> list[tuple[int, int]]:
        """Return the index of the first phase of each schedule, and of the phase after its last."""
        firsts = [index for index, phase in enumerate(self.phases) if phase.schedule is not None or index == 0]
        return list(zip(firsts, [*firsts[1:], len(self.phases)], strict=True))

    @property
    def matrices(self) -> Matrices:
        """The optimizer of matrices: AdamW for adapters, which are too narrow to orthogonalize."""
        return self.optimizer.matrices if self.lora is None else "adamw"

    def context_for(self, phase: PhaseConfig) -> int:
        """Return the tokens per row of `phase`."""
        return self.data.context if phase.context is None else phase.context

    def batch_for(self, phase: PhaseConfig) -> BatchConfig:
        """Return the batch sizes of `phase`."""
        return self.train.batch if phase.batch is None else phase.batch

    def remat_for(self, phase: PhaseConfig) -> Remat:
        """Return the rematerialization policy of `phase`."""
        return self.train.remat if phase.remat is None else phase.remat

    def parallel_for(self, phase: PhaseConfig) -> ParallelConfig:
        """Return the parallel layout of `phase`."""
        return self.parallel if phase.parallel is None else phase.parallel

    def model_for(self, phase: PhaseConfig) -> ModelConfig:
        """Return the architecture with the RoPE base of `phase`."""
        return self.model if phase.rope_base is None else replace(self.model, rope_base=phase.rope_base)
