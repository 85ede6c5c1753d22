"""What can be configured: one frozen dataclass a section.

Field names are the YAML keys. A field without a default must be given. Checks that concern one section
stand in its `check`, those that join sections in `Config.check`; all raise `InputError`.
"""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from zaya_jax.config.table import Table
from zaya_jax.errors import InputError

AttentionKind = Literal["full", "sliding"]
Dtype = Literal["float32", "bfloat16"]
Remat = Literal["none", "dots", "full"]
Packing = Literal["windows", "bins"]
OverLength = Literal["split", "trim", "drop"]
CORPUS = "corpus"  # the source's name where data.sources names none


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raise `InputError` naming `key`, its `value` and what is `allowed`, unless `condition` holds."""
    if not condition:
        raise InputError(f"{key} is {value!r}, but must be {allowed}.")


def _positive(section: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value > 0, f"{section}.{name}", value, "greater than zero")


def _path(key: str, text: str) -> None:
    """Refuse what can be no path here: a NUL byte, a name too long, the home of a user that is not there."""
    try:
        os.lstat(Path(text).expanduser())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"{key} is {text!r}, which can be no path: {error}.") from error


@dataclass(frozen=True)
class ModelConfig:
    """The ZAYA1 architecture (zaya1.md §1.1). Defaults are those of the released 8B."""

    vocab_size: int
    hidden_size: int
    num_layers: int  # each is one CCA and one mixture-of-experts sublayer
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int  # real experts; the router has one more class, skip
    expert_size: int  # width of each of gate and up
    router_size: int
    max_positions: int
    layer_pattern: tuple[AttentionKind, ...] = ("full",)  # repeated along the depth
    sliding_window: int | None = None  # keys a query sees, itself included
    rope_base: float = 5.0e6
    sliding_rope_base: float = 1.0e4
    rotary_fraction: float = 0.5  # part of each head's channels that carries the position
    depthwise_kernel: int = 2
    grouped_kernel: int = 2
    attention_bias: bool = False
    head_bias: bool = False
    norm_eps: float = 1.0e-5
    init_std: float = 0.02  # of the embedding; matrices start at the inverse root of their input's width

    def check(self) -> None:
        """Raise `InputError` where the sizes do not fit one another."""
        _positive("model", self, "vocab_size", "hidden_size", "num_layers", "num_query_heads", "num_kv_heads",
                  "head_dim", "num_experts", "expert_size", "router_size", "max_positions",
                  "depthwise_kernel", "grouped_kernel", "norm_eps", "init_std", "rope_base",
                  "sliding_rope_base")  # fmt: skip
        require(self.num_query_heads % self.num_kv_heads == 0, "model.num_query_heads", self.num_query_heads,
                f"a multiple of model.num_kv_heads ({self.num_kv_heads})")  # fmt: skip
        require((self.num_kv_heads * self.head_dim) % 2 == 0, "model.head_dim", self.head_dim,
                "even where model.num_kv_heads is odd, since half of the value is delayed")  # fmt: skip
        require(0 <= self.rotary_fraction <= 1, "model.rotary_fraction", self.rotary_fraction, "between 0 and 1")
        require(self.rotary_size % 2 == 0, "model.rotary_fraction", self.rotary_fraction,
                f"such that its part of model.head_dim ({self.head_dim}) is an even number of channels")  # fmt: skip
        require(len(self.layer_pattern) > 0 and self.num_layers % len(self.layer_pattern) == 0,
                "model.layer_pattern", list(self.layer_pattern),
                f"a list whose length divides model.num_layers ({self.num_layers})")  # fmt: skip
        if "sliding" in self.layer_pattern:
            require(self.sliding_window is not None and self.sliding_window > 0, "model.sliding_window",
                    self.sliding_window, "a positive number of tokens, since a layer is sliding")  # fmt: skip

    @property
    def rotary_size(self) -> int:
        """Channels of a head that are rotated."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_query_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all keys (or of all values) together."""
        return self.num_kv_heads * self.head_dim

    @property
    def period(self) -> tuple[AttentionKind, ...]:
        """The shortest pattern that gives the same layers: what one step of the layer scan holds."""
        pattern = self.layer_pattern
        for length in range(1, len(pattern) + 1):
            if len(pattern) % length == 0 and pattern == pattern[:length] * (len(pattern) // length):
                return pattern[:length]
        return pattern

    @property
    def num_groups(self) -> int:
        """Steps of the layer scan."""
        return self.num_layers // len(self.period)


@dataclass(frozen=True)
class SourceConfig:
    """Documents that `python -m zaya_jax.data prepare` made."""

    path: str  # the folder
    max_epochs: float | None = None  # times a run may read it at most


@dataclass(frozen=True)
class PhaseConfig:
    """What the steps from `first_step` to the next phase read, and how it becomes rows."""

    first_step: int = 0
    mixture: Table[float] = field(
        default_factory=Table[float]
    )  # rows of each source, as parts; by their tokens where empty
    context: int | None = None  # data.context where None
    packing: Packing = "windows"  # windows of the concatenated documents, or bins of whole documents
    over_length: OverLength = "split"  # what becomes of a document longer than a row
    template: str | None = None  # Jinja file that writes out conversations; the built-in one where None

    def check(self, where: str) -> None:
        """Raise `InputError` for a value outside its range; `where` is the phase's own key."""
        require(self.first_step >= 0, f"{where}.first_step", self.first_step, "at least 0")
        require(self.context is None or self.context > 0, f"{where}.context", self.context, "greater than zero")
        for name, weight in self.mixture.items():
            require(weight > 0, f"{where}.mixture.{name}", weight, "greater than zero (a source not named is not read)")
        if self.template is not None:
            _path(f"{where}.template", self.template)


@dataclass(frozen=True)
class DataConfig:
    """What is read: prepared sources, or the text files of a folder as the one source 'corpus'."""

    corpus: str = "stdlib"  # 'stdlib' (the source of the running Python's standard library) or a folder
    suffixes: tuple[str, ...] = (".py",)  # files taken from the folder
    heldout_fraction: float = 0.04  # of the files, by a hash of each path
    sources: Table[SourceConfig] = field(
        default_factory=Table[SourceConfig]
    )  # read in place of the corpus where there are any
    phases: tuple[PhaseConfig, ...] = (PhaseConfig(),)  # in order; each goes on in a source where the last one stopped
    cache_dir: str = "runs/data"  # what is made of sources and corpus is kept here, by content
    context: int = 512  # tokens a row, of phases that do not say and of held-out text
    workers: int = 0  # processes that make batches; with 0, threads of the training process do

    def check(self) -> None:
        """Raise `InputError` for a context, a fraction or phases that cannot be."""
        _positive("data", self, "context")
        _path("data.corpus", self.corpus)
        _path("data.cache_dir", self.cache_dir)
        require(0 < self.heldout_fraction < 1, "data.heldout_fraction", self.heldout_fraction, "between 0 and 1")
        require(len(self.suffixes) > 0, "data.suffixes", list(self.suffixes), "a list of at least one file suffix")
        require(0 <= self.workers <= 256, "data.workers", self.workers, "between 0 and 256")
        names = list(self.sources) or [CORPUS]
        for name, source in self.sources.items():
            require(name.replace("-", "_").isidentifier(), "data.sources", name, "a name of letters, digits, _ and -")
            require(source.path != "", f"data.sources.{name}.path", source.path, "the path of a folder")
            _path(f"data.sources.{name}.path", source.path)
            require(source.max_epochs is None or source.max_epochs > 0, f"data.sources.{name}.max_epochs",
                    source.max_epochs, "greater than zero")  # fmt: skip
        require(len(self.phases) > 0, "data.phases", [], "a list of at least one phase")
        require(self.phases[0].first_step == 0, "data.phases[0].first_step", self.phases[0].first_step, "0")
        for index, phase in enumerate(self.phases):
            where = f"data.phases[{index}]"
            phase.check(where)
            for name in phase.mixture:
                require(name in names, f"{where}.mixture", name, f"made of sources that there are: {', '.join(names)}")
            if index:
                before = self.phases[index - 1].first_step
                require(phase.first_step > before, f"{where}.first_step", phase.first_step,
                        f"greater than that of the phase before ({before})")  # fmt: skip

    def context_of(self, phase: PhaseConfig) -> int:
        """Tokens a row of `phase`."""
        return self.context if phase.context is None else phase.context

    def phase_at(self, step: int) -> PhaseConfig:
        """The phase that the step `step`, counted from 0, belongs to."""
        return next(phase for phase in reversed(self.phases) if phase.first_step <= step)


@dataclass(frozen=True)
class MuonConfig:
    """Muon for attention, router and expert matrices (zaya1.md §3.1)."""

    learning_rate: float = 6.0e-4  # of AdamW's scale: an update has RMS 0.2 times this
    momentum: float = 0.95
    nesterov: bool = True
    newton_schulz_steps: int = 5
    weight_decay: float = 0.1

    def check(self) -> None:
        """Raise `InputError` for a value outside its range."""
        _positive("optimizer.muon", self, "learning_rate", "newton_schulz_steps")
        require(0 <= self.momentum < 1, "optimizer.muon.momentum", self.momentum, "at least 0 and below 1")
        require(self.weight_decay >= 0, "optimizer.muon.weight_decay", self.weight_decay, "at least 0")


@dataclass(frozen=True)
class AdamWConfig:
    """AdamW for every other trained parameter; decay acts on embedding and convolutions alone."""

    learning_rate: float = 6.0e-4
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1.0e-8
    weight_decay: float = 0.1

    def check(self) -> None:
        """Raise `InputError` for a value outside its range."""
        _positive("optimizer.adamw", self, "learning_rate", "eps")
        for name in ("b1", "b2"):
            require(0 <= getattr(self, name) < 1, f"optimizer.adamw.{name}", getattr(self, name),
                    "at least 0 and below 1")  # fmt: skip
        require(self.weight_decay >= 0, "optimizer.adamw.weight_decay", self.weight_decay, "at least 0")


@dataclass(frozen=True)
class BalanceConfig:
    """AdamW on the balancing bias, whose gradient is the load's distance from uniform (zaya1.md §3.3)."""

    learning_rate: float = 1.0e-3
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1.0e-8

    def check(self) -> None:
        """Raise `InputError` for a value outside its range."""
        _positive("optimizer.balance", self, "learning_rate", "eps")
        for name in ("b1", "b2"):
            require(0 <= getattr(self, name) < 1, f"optimizer.balance.{name}", getattr(self, name),
                    "at least 0 and below 1")  # fmt: skip


@dataclass(frozen=True)
class OptimizerConfig:
    """One transform a role, one schedule for all: cosine with a linear warm-up."""

    muon: MuonConfig = field(default_factory=MuonConfig)
    adamw: AdamWConfig = field(default_factory=AdamWConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    clip_norm: float = 1.0  # of the gradient over all parameters
    warmup_steps: int = 0
    final_fraction: float = 0.1  # the cosine's end, as a part of the peak

    def check(self) -> None:
        """Raise `InputError` for a value outside its range."""
        self.muon.check()
        self.adamw.check()
        self.balance.check()
        _positive("optimizer", self, "clip_norm")
        require(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "at least 0")
        require(0 <= self.final_fraction <= 1, "optimizer.final_fraction", self.final_fraction, "between 0 and 1")


@dataclass(frozen=True)
class TrainConfig:
    """The length of the run and the shape of a step."""

    steps: int = 1000
    global_batch: int = 16  # sequences a step
    micro_batches: int = 1  # parts a step's batch is worked through in, their gradients added up
    compute_dtype: Dtype = "float32"
    remat: Remat = "none"  # what the backward pass computes again: nothing, all but products, everything
    max_skipped_steps: int = 10  # steps in a row with a non-finite loss or gradient before the run stops
    log_every: int = 10  # steps between two console lines

    def check(self) -> None:
        """Raise `InputError` for a value outside its range."""
        _positive("train", self, "steps", "global_batch", "micro_batches", "max_skipped_steps", "log_every")
        require(self.global_batch % self.micro_batches == 0, "train.global_batch", self.global_batch,
                f"a multiple of train.micro_batches ({self.micro_batches})")  # fmt: skip


@dataclass(frozen=True)
class EvaluationConfig:
    """The held-out loss: on a fixed part during the run, on every byte at its end."""

    every: int = 100  # steps
    batches: int = 8  # evaluated during the run
    batch: int = 16  # sequences a batch

    def check(self) -> None:
        """Raise `InputError` for a value outside its range."""
        _positive("evaluation", self, "every", "batches", "batch")


@dataclass(frozen=True)
class CheckpointConfig:
    """When state is saved, and how many saves are kept."""

    every: int = 100  # steps
    keep: int = 2

    def check(self) -> None:
        """Raise `InputError` for a value outside its range."""
        _positive("checkpoint", self, "every", "keep")


@dataclass(frozen=True)
class SampleConfig:
    """The continuation written at the end of a run."""

    prompt: str = "def "
    tokens: int = 96  # at most: the text may end before, and so may model.max_positions
    temperature: float = 0.8

    def check(self) -> None:
        """Raise `InputError` for a value outside its range."""
        _positive("sample", self, "tokens")
        require(len(self.prompt) > 0, "sample.prompt", self.prompt, "a text of at least one character")
        require(not any(0xD800 <= ord(c) < 0xE000 for c in self.prompt), "sample.prompt", self.prompt,
                "a text without lone surrogates")  # fmt: skip
        require(self.temperature >= 0 and math.isfinite(self.temperature), "sample.temperature",
                self.temperature, "at least 0 (0 takes the likeliest token)")  # fmt: skip


@dataclass(frozen=True)
class Config:
    """A whole run."""

    model: ModelConfig
    run_dir: str = "runs/run"
    seed: int = 0
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)

    def check(self) -> None:
        """Raise `InputError` where a section, or two together, cannot be."""
        for section in (self.model, self.data, self.optimizer, self.train, self.evaluation, self.checkpoint,
                        self.sample):  # fmt: skip
            section.check()
        require(0 <= self.seed < 2**31, "seed", self.seed, "at least 0 and below 2147483648")
        require(self.run_dir != "", "run_dir", self.run_dir, "the path of a folder")
        _path("run_dir", self.run_dir)
        require(self.data.context <= self.model.max_positions, "data.context", self.data.context,
                f"at most model.max_positions ({self.model.max_positions})")  # fmt: skip
        for index, phase in enumerate(self.data.phases):
            context = self.data.context_of(phase)
            require(context <= self.model.max_positions, f"data.phases[{index}].context", context,
                    f"at most model.max_positions ({self.model.max_positions})")  # fmt: skip
            require(phase.first_step < self.train.steps, f"data.phases[{index}].first_step", phase.first_step,
                    f"below train.steps ({self.train.steps})")  # fmt: skip
        prompt = 1 + len(self.sample.prompt.encode())  # no tokenizer makes more tokens of it
        require(prompt < self.model.max_positions, "sample.prompt", self.sample.prompt,
                f"a text of at most {self.model.max_positions - 2} bytes (model.max_positions less 2)")  # fmt: skip
        require(self.optimizer.warmup_steps < self.train.steps, "optimizer.warmup_steps",
                self.optimizer.warmup_steps, f"below train.steps ({self.train.steps})")  # fmt: skip
