"""The largest number that each field may hold.

Larger values overflow 32-bit indices or are beyond any machine. Whether a device has enough memory is checked where the
devices are known.
"""

import dataclasses
import math
from typing import Any

from zaya_jax.config.checks import item_keys, require
from zaya_jax.config.table import Table

_INT, _FLOAT = 2**31 - 1, 1e12  # of fields that are not listed
_TOKENS = 10**15  # of a phase or a part of it
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
    "ModelConfig.max_positions": 2**24,  # fp32 counts them exactly
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
    "SpikeConfig.window": 2**16,  # held on each device
    "LoraConfig.rank": 2**14,
    "LoraConfig.alpha": 1e6,
}


def check_bounds(section: Any, where: str = "") -> None:
    """Raise `InputError` where a number in `section` or below it is not finite, or larger than its field allows.

    Args:
      section: a dataclass of the schema.
      where: its key; empty for the whole configuration.
    """
    for field in dataclasses.fields(section):
        largest = LARGEST.get(f"{type(section).__name__}.{field.name}")
        _check(getattr(section, field.name), f"{where}.{field.name}" if where else field.name, largest)


def _check(value: Any, key: str, largest: float | None) -> None:
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
