"""The schema of a configuration: one frozen dataclass a section.

Field names are the YAML keys. A field without a default must be given. Checks that concern one section
stand in its `check`, those that join sections in `Config.check`; all raise `InputError`.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from zaya_jax.config.bounds import NonNegative, Positive, check_bounds
from zaya_jax.config.checks import item_keys, require, require_path
from zaya_jax.config.data import DataConfig
from zaya_jax.config.lora import LoraConfig
from zaya_jax.config.model import ModelConfig
from zaya_jax.config.optimizer import ComputeDtype, Matrices, OptimizerConfig
from zaya_jax.config.parallel import ParallelConfig
from zaya_jax.config.phases import BatchConfig, PhaseConfig, Remat
from zaya_jax.config.weight_source import HF, parse_source
from zaya_jax.errors import InputError
from zaya_jax.hardware.presets import PRESETS, PresetName

Verify = Literal["none", "hash", "readback"]
MAX_PHASES = 1000


@dataclass(frozen=True)
class SpikeConfig:
    """Which steps are skipped for a loss or gradient norm far above those of the steps before.

    A value is a spike where it lies more than `threshold` robust standard deviations (1.4826 times the median
    distance from the median) above the median.
    """

    window: NonNegative[int] = 128  # steps looked back at, of the same phase and not skipped; with 0 no step is a spike
    threshold: Positive[float] = 10.0


@dataclass(frozen=True)
class TrainConfig:
    """The shape of a training step, and when a step is skipped."""

    batch: BatchConfig = field(default_factory=BatchConfig)  # of phases that give none
    compute_dtype: ComputeDtype = "float32"
    remat: Remat = "none"  # what the backward pass computes again: nothing, all but products, everything
    spike: SpikeConfig = field(default_factory=SpikeConfig)
    max_skipped_steps: Positive[int] = 10  # steps skipped in a row before the run stops
    log_every: Positive[int] = 10  # steps between two console lines


@dataclass(frozen=True)
class EvaluationConfig:
    """The held-out loss, over the same batches during the run and at its end."""

    every: Positive[int] = 100  # steps
    batches: Positive[int] = 8  # of each source, from all over its held-out text; all of it where there are fewer
    batch_size: Positive[int] = 16  # sequences a batch


@dataclass(frozen=True)
class CheckpointConfig:
    """When state is saved, how it is verified, and which saves are kept."""

    every: Positive[int] = 100  # steps
    keep: Positive[int] = 2  # the newest
    keep_every: Positive[int] | None = None  # steps: those of its multiples stay for good
    keep_best: NonNegative[int] = 0  # those of lowest held-out loss
    # Digests of what is saved, which restoring compares; 'readback' also reads each checkpoint before it counts.
    verify: Verify = "hash"
    max_unsaved_seconds: Positive[float] = 3600.0  # seconds that training goes on while saves fail
    local_dir: str | None = None  # a folder on each node's own disk or memory, for a copy that is read first

    def check(self) -> None:
        """Raise `InputError` for a value outside its range."""
        require(self.local_dir is None or self.verify != "none", "checkpoint.local_dir", self.local_dir,
                "null where checkpoint.verify is none: a copy counts by its digests")  # fmt: skip
        if self.local_dir is not None:
            require_path("checkpoint.local_dir", self.local_dir)


@dataclass(frozen=True)
class SampleConfig:
    """The continuation written at the end of a run."""

    prompt: str = "def "
    # At most: the text may end before, and so may model.max_positions. A device then holds all parameters in fp32; 0
    # writes none.
    tokens: NonNegative[int] = 96
    temperature: float = 0.8

    def check(self) -> None:
        """Raise `InputError` for a value outside its range."""
        require(len(self.prompt) > 0, "sample.prompt", self.prompt, "a text of at least one character")
        require(not any(0xD800 <= ord(c) < 0xE000 for c in self.prompt), "sample.prompt", self.prompt,
                "a text without lone surrogates")  # fmt: skip
        allowed = "at least 0 (0 takes the likeliest token)"
        require(self.temperature >= 0, "sample.temperature", self.temperature, allowed)


@dataclass(frozen=True)
class Config:
    """A whole run."""

    model: ModelConfig
    phases: tuple[PhaseConfig, ...]  # in order; optimizer, balancing and each source go on from one to the next
    run_dir: str = "runs/run"
    preset: PresetName | None = None  # flags and timeouts of a kind of machine; that of the GPU found where None
    seed: int = 0
    # The state it begins with, RUN_DIR, RUN_DIR@PHASE or RUN_DIR/checkpoints/STEP; parameters alone, hf:FOLDER.
    init_from: str | None = None
    # The run it continues in a new run_dir, with its complete state and position: same forms, but no hf:FOLDER.
    resume_from: str | None = None
    lora: LoraConfig | None = None  # adapters are trained, on the parameters of init_from; all parameters where None
    start_phase: str | None = None  # the phase this run begins with; the first where None
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)  # of phases that give none
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)

    def check(self) -> None:
        """Raise `InputError` where a section or a combination of sections is invalid."""
        if not 0 < len(self.phases) <= MAX_PHASES:
            raise InputError(f"phases has {len(self.phases)} items, but must have between 1 and {MAX_PHASES:,}.")
        check_bounds(self)
        for section in (self.model, self.data, self.checkpoint, self.sample):
            section.check()
        self.train.batch.check("train.batch")
        require(0 <= self.seed < 2**31, "seed", self.seed, "at least 0 and below 2147483648")
        require(self.run_dir != "", "run_dir", self.run_dir, "the path of a folder")
        require_path("run_dir", self.run_dir)
        require(self.preset is None or self.preset in PRESETS, "preset", self.preset,
                f"null or one of {', '.join(PRESETS)}")  # fmt: skip
        if self.init_from is not None:
            path = parse_source(self.init_from).path
            require(path != "", "init_from", self.init_from, f"the path of a run or a checkpoint, or {HF}FOLDER")
            require_path("init_from", path)
        if self.resume_from is not None:
            require(self.resume_from != "", "resume_from", self.resume_from, "the path of a run or a checkpoint")
            require_path("resume_from", self.resume_from)
            require(self.init_from is None, "resume_from", self.resume_from,
                    f"null where init_from is given ({self.init_from!r}): resume_from takes another run's complete "
                    "state and position, init_from begins anew with its parameters and optimizer")  # fmt: skip
            require(parse_source(self.resume_from).kind == "checkpoint", "resume_from", self.resume_from,
                    f"a run, since {HF}FOLDER has no optimizer state to resume; use init_from")  # fmt: skip
        if self.lora is not None:
            require(self.init_from is not None, "init_from", self.init_from,
                    "given where lora is, since adapters change an existing model")  # fmt: skip
        longest = f"at most model.max_positions ({self.model.max_positions})"
        require(self.data.context <= self.model.max_positions, "data.context", self.data.context, longest)
        prompt = 1 + len(self.sample.prompt.encode())  # no tokenizer makes more tokens of it
        require(prompt < self.model.max_positions, "sample.prompt", self.sample.prompt,
                f"a text of at most {self.model.max_positions - 2} bytes (model.max_positions less 2)")  # fmt: skip
        for index, phase in enumerate(self.phases):
            phase.check(self.phase_key(index))
        names = [phase.name for phase in self.phases]
        for index, phase in enumerate(self.phases):
            where = self.phase_key(index)
            require(phase.name not in names[:index], f"{where}.name", phase.name, "unique among the phases")
            require(self.context_for(phase) <= self.model.max_positions, f"{where}.context", self.context_for(phase),
                    longest)  # fmt: skip
            for source in phase.mixture:
                require(source in self.data.source_names, f"{where}.mixture", source,
                        f"made of sources that exist: {', '.join(self.data.source_names)}")  # fmt: skip
            self._check_batch(phase, where)
            # Held-out rows are of `data.context`, whatever the phase.
            contexts = {"the context": self.context_for(phase), "data.context": self.data.context}
            self.parallel_for(phase).check(self.parallel_key(phase), self.model, contexts)
        require(self.start_phase is None or self.start_phase in names, "start_phase", self.start_phase,
                f"one of {', '.join(names)}")  # fmt: skip
        self._check_schedules()

    def _check_batch(self, phase: PhaseConfig, where: str) -> None:
        batch, context, key = self.batch_for(phase), self.context_for(phase), self.batch_key(phase)
        context_key = "data.context" if phase.context is None else f"{where}.context"
        whole = f"a multiple of {context_key} ({context}), since a step consists of whole rows"
        for index, size in enumerate(batch.stepped):
            require(size.tokens % context == 0, f"{key}.stepped.{index}.tokens", size.tokens, whole)
        require(batch.tokens % context == 0, f"{key}.tokens", batch.tokens, whole)
        require((batch.start or 0) % context == 0, f"{key}.start", batch.start, whole)
        for _, size in batch.sizes():
            require(batch.micro_batch is None or (size // context) % batch.micro_batch == 0, f"{key}.micro_batch",
                    batch.micro_batch,
                    f"a number that divides the {size // context} sequences of a step in {where}")  # fmt: skip

    def _check_schedules(self) -> None:
        """Refuse a warm-up or a decay longer than the phases that its schedule spans."""
        for first, after in self.schedule_phases():
            schedule = self.phases[first].schedule
            if schedule is None:
                continue
            budget = sum(phase.tokens for phase in self.phases[first:after])
            where = f"{self.phase_key(first)}.schedule"
            decay, most = schedule.decay_tokens or 0, f"the {budget:,} tokens of the phases that the schedule spans"
            require(schedule.warmup_tokens <= budget, f"{where}.warmup_tokens", schedule.warmup_tokens,
                    f"at most {most}")  # fmt: skip
            together = f"such that it and warmup_tokens ({schedule.warmup_tokens}) together are at most {most}"
            require(schedule.warmup_tokens + decay <= budget, f"{where}.decay_tokens", decay, together)

    def phase_key(self, index: int) -> str:
        """The key of a phase, for messages: by its name, or by its index where another has the same name."""
        return item_keys("phases", [phase.name for phase in self.phases])[index]

    def batch_key(self, phase: PhaseConfig) -> str:
        """The key that the batches of `phase` come from."""
        return "train.batch" if phase.batch is None else f"{self.phase_key(self.phases.index(phase))}.batch"

    def parallel_key(self, phase: PhaseConfig) -> str:
        """The key that the layout of `phase` comes from."""
        return "parallel" if phase.parallel is None else f"{self.phase_key(self.phases.index(phase))}.parallel"

    def schedule_phases(self) -> list[tuple[int, int]]:
        """The index of the first phase of each schedule, and that of the phase after its last."""
        firsts = [index for index, phase in enumerate(self.phases) if phase.schedule is not None or index == 0]
        return list(zip(firsts, [*firsts[1:], len(self.phases)], strict=True))

    @property
    def matrices(self) -> Matrices:
        """The optimizer of matrices: AdamW for adapters, which are too narrow to orthogonalise."""
        return self.optimizer.matrices if self.lora is None else "adamw"

    def context_for(self, phase: PhaseConfig) -> int:
        """Tokens a row of `phase`."""
        return self.data.context if phase.context is None else phase.context

    def batch_for(self, phase: PhaseConfig) -> BatchConfig:
        """The batches of `phase`."""
        return self.train.batch if phase.batch is None else phase.batch

    def remat_for(self, phase: PhaseConfig) -> Remat:
        """The rematerialization of `phase`."""
        return self.train.remat if phase.remat is None else phase.remat

    def parallel_for(self, phase: PhaseConfig) -> ParallelConfig:
        """The parallel layout of `phase`."""
        return self.parallel if phase.parallel is None else phase.parallel

    def model_for(self, phase: PhaseConfig) -> ModelConfig:
        """The architecture with the positions of `phase`."""
        return self.model if phase.rope_base is None else replace(self.model, rope_base=phase.rope_base)
