"""Lower and upper bounds of every numeric field.

The field's type carries the lower bound. A value above the upper bound would overflow 32-bit indices or exceed any
machine. Device memory is checked later, once the devices are known.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, TypeVar

from zaya_jax.config.checks import item_keys, require
from zaya_jax.config.table import Table

Number = TypeVar("Number", int, float)


class Range(NamedTuple):
    """The allowed values of a field, attached to its type."""

    words: str
    contains: Callable[[float], bool]


Positive = Annotated[Number, Range("greater than 0", lambda number: number > 0)]
NonNegative = Annotated[Number, Range("at least 0", lambda number: number >= 0)]
Decay = Annotated[float, Range("at least 0 and below 1", lambda number: 0 <= number < 1)]

_INT, _FLOAT = 2**31 - 1, 1e12  # default upper bounds of fields without an entry in LARGEST
_TOKENS = 10**15  # of a phase
_STEP_TOKENS = 2**28

LARGEST: dict[str, float] = {
    "ModelConfig.vocab_size": 2**24,
    "ModelConfig.hidden_size": 2**18,
    "ModelConfig.num_layers": 2**12,
    "ModelConfig.num_query_heads": 2**12,
    "ModelConfig.num_kv_heads": 2**12,
    "ModelConfig.head_dim": 2**12,
    "ModelConfig.num_experts": 2**14,
    "ModelConfig.expert_size": 2**18,
    "ModelConfig.router_size": 2**16,
    "ModelConfig.max_positions": 2**24,  # fp32 represents every integer up to this
    "ModelConfig.depthwise_kernel": 64,
    "ModelConfig.grouped_kernel": 64,
    "ModelConfig.norm_eps": 1,
    "ModelConfig.init_std": 1e3,
    "MuonConfig.learning_rate": 1e6,
    "MuonConfig.newton_schulz_steps": 100,
    "MuonConfig.weight_decay": 1e6,
    "AdamWConfig.learning_rate": 1e6,
    "AdamWConfig.eps": 1e6,
    "AdamWConfig.weight_decay": 1e6,
    "RoleConfig.learning_rate": 1e6,
    "RoleConfig.weight_decay": 1e6,
    "BalanceConfig.learning_rate": 1e6,
    "BalanceConfig.eps": 1e6,
    "ScheduleConfig.peak": 1e6,
    "ScheduleConfig.warmup_tokens": _TOKENS,
    "ScheduleConfig.decay_tokens": _TOKENS,
    "DataConfig.skip_rows": _TOKENS,
    "PhaseConfig.tokens": _TOKENS,
    "BatchConfig.tokens": _STEP_TOKENS,
    "BatchConfig.start": _STEP_TOKENS,
    "BatchConfig.ramp_tokens": _TOKENS,
    "BatchSizeConfig.until": _TOKENS,
    "BatchSizeConfig.tokens": _STEP_TOKENS,
    "ParallelConfig.data": 2**20,
    "ParallelConfig.fsdp": 2**20,
    "ParallelConfig.expert": 2**20,
    "ParallelConfig.context": 2**20,
    "SpikeConfig.window": 2**16,  # every device stores the window
    "LoraConfig.rank": 2**14,
    "LoraConfig.alpha": 1e6,
}


def check_bounds(section: Any, where: str = "") -> None:
    """Raise `InputError` if a number in `section` or its subsections is not finite or out of bounds.

    Args:
      section: a dataclass of the schema.
      where: the key of the section; empty for the whole configuration.
    """
    for name, allowed in _ranges(type(section)).items():
        largest = LARGEST.get(f"{type(section).__name__}.{name}")
        _check(getattr(section, name), f"{where}.{name}" if where else name, largest, allowed)


@functools.cache
def _ranges(section: type) -> dict[str, Range | None]:
    """Return the `Range` in the type annotation of each field, or None."""
    hints = typing.get_type_hints(section, include_extras=True)
    metadata = {name: [getattr(part, "__metadata__", (None,))[0] for part in (hint, *typing.get_args(hint))]
                for name, hint in hints.items()}  # fmt: skip
    return {name: next(filter(None, ranges), None) for name, ranges in metadata.items()}


def _check(value: Any, key: str, largest: float | None, allowed: Range | None = None) -> None:
    if dataclasses.is_dataclass(value):
        check_bounds(value, key)
    elif isinstance(value, tuple):
        for item, item_key in zip(value, item_keys(key, [getattr(x, "name", None) for x in value]), strict=True):
            _check(item, item_key, largest)
    elif isinstance(value, Table):
        for name, item in value.items():
            _check(item, f"{key}.{name}", largest)
    elif isinstance(value, int | float):
        whole = isinstance(value, int)
        most = (_INT if whole else _FLOAT) if largest is None else largest
        require(whole or math.isfinite(value), key, value, "a finite number")
        require(value <= most, key, value, f"at most {most:,}" if whole else f"at most {most:g}")
        require(allowed is None or allowed.contains(value), key, value, allowed.words if allowed else "")
