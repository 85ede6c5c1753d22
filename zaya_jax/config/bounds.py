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
_BY_BOUND = {
    1: "ModelConfig.norm_eps",
    64: "ModelConfig.depthwise_kernel ModelConfig.grouped_kernel",
    100: "MuonConfig.newton_schulz_steps",
    1e3: "ModelConfig.init_std",
    2**12: "ModelConfig.num_layers ModelConfig.num_query_heads ModelConfig.num_kv_heads ModelConfig.head_dim",
    2**14: "ModelConfig.num_experts LoraConfig.rank",
    2**16: "ModelConfig.router_size SpikeConfig.window",  # every device stores the window
    2**18: "ModelConfig.hidden_size ModelConfig.expert_size",
    1e6: "MuonConfig.learning_rate MuonConfig.weight_decay AdamWConfig.learning_rate AdamWConfig.weight_decay "
    "AdamWConfig.eps RoleConfig.learning_rate RoleConfig.weight_decay BalanceConfig.learning_rate BalanceConfig.eps "
    "ScheduleConfig.peak LoraConfig.alpha",
    2**20: "ParallelConfig.data ParallelConfig.fsdp ParallelConfig.expert ParallelConfig.context",
    2**24: "ModelConfig.vocab_size ModelConfig.max_positions",  # fp32 represents every integer up to this
    2**28: "BatchConfig.tokens BatchConfig.start BatchSizeConfig.tokens",
    10**15: "ScheduleConfig.warmup_tokens ScheduleConfig.decay_tokens DataConfig.skip_rows PhaseConfig.tokens "
    "BatchConfig.ramp_tokens BatchSizeConfig.until",
}
LARGEST: dict[str, float] = {field: bound for bound, fields in _BY_BOUND.items() for field in fields.split()}


def check_bounds(section: Any, key: str = "") -> None:
    """Raise `InputError` if a number in `section`, whose key is `key`, or its subsections is out of bounds."""
    for name, allowed in _ranges(type(section)).items():
        largest = LARGEST.get(f"{type(section).__name__}.{name}")
        _check(getattr(section, name), f"{key}.{name}" if key else name, largest, allowed)


@functools.cache
def _ranges(section: type) -> dict[str, Range | None]:
    return {name: _range(hint) for name, hint in typing.get_type_hints(section, include_extras=True).items()}


def _range(hint: Any) -> Range | None:
    parts = (hint, *typing.get_args(hint))  # of `Positive[int] | None`, too
    return next((part.__metadata__[0] for part in parts if hasattr(part, "__metadata__")), None)


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
        is_integer = isinstance(value, int)
        most = largest or (_INT if is_integer else _FLOAT)
        require(is_integer or math.isfinite(value), key, value, "a finite number")
        require(value <= most, key, value, f"at most {most:,}" if is_integer else f"at most {most:g}")
        if allowed is not None:
            require(allowed.contains(value), key, value, allowed.words)
