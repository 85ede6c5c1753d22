"""Convert `config.json` of a `transformers` ZAYA folder to `ModelConfig` and back (docs/reference.md §12.1)."""

from collections.abc import Mapping
from typing import Any

from zaya_jax.config import ModelConfig
from zaya_jax.config.checks import shown
from zaya_jax.config.model import AttentionKind
from zaya_jax.errors import InputError

_SIZES = {  # ours: theirs
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_query_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "num_experts": "num_experts",
    "expert_size": "moe_intermediate_size",
    "router_size": "router_hidden_size",
    "max_positions": "max_position_embeddings",
    "depthwise_kernel": "cca_time0",
    "grouped_kernel": "cca_time1",
}
_KINDS: dict[str, AttentionKind] = {"hybrid": "full", "hybrid_sliding": "sliding"}
_ABLATIONS = ("attention", "router", "residual_scaling", "convolutions", "query_key_mean", "value_shift",
              "router_layers", "depth_averaging")  # fmt: skip
_ONLY = {key: getattr(ModelConfig, key) for key in _ABLATIONS}
_FIXED = {"hidden_act": ("silu",), "tie_word_embeddings": (True,), "num_experts_per_tok": (1,)}
_LARGEST = 1e300  # a larger integer would overflow a float
_QUANTIZED = ("quantization_config", "compression_config", "vision_config", "vision_lora")


def from_hf(tree: dict[str, Any], where: str) -> ModelConfig:
    """Parse the architecture of a `config.json`.

    Args:
      tree: content of the file.
      where: its path, for messages.

    Raises:
      InputError: a key is missing, or its value is not supported.
    """
    require_zaya(tree, _FIXED, where)
    sizes = {ours: whole(tree, theirs, where) for ours, theirs in _SIZES.items()}
    types = _layer_types(tree, sizes["num_layers"], where)
    bases, fraction = _rope(tree.get("rope_parameters"), types, where)
    return build(
        where,
        **sizes,
        layer_pattern=tuple(_KINDS[kind] for kind in types),
        sliding_window=window(tree, where) if "hybrid_sliding" in types else None,
        rope_base=bases["hybrid"],
        sliding_rope_base=bases["hybrid_sliding"],
        rotary_fraction=fraction,
        attention_bias=flag(tree, "attention_bias", where),
        head_bias=flag(tree, "lm_head_bias", where),
        norm_eps=number(tree, "rms_norm_eps", 1e-5, where),
        init_std=number(tree, "initializer_range", 0.02, where),
    )


def build(where: str, **fields: Any) -> ModelConfig:
    """Build and check a configuration."""
    config = ModelConfig(**fields)
    try:
        config.check()
    except InputError as error:
        raise InputError(f"{where} describes an invalid model: {error}") from error
    return config


def require_zaya(tree: dict[str, Any], fixed: Mapping[str, tuple[Any, ...]], where: str) -> None:
    """Raise `InputError` for another model type, a quantized or vision variant, or another value of a `fixed` key."""
    if tree.get("model_type") != "zaya":
        raise InputError(f"{where} has model_type {shown(tree.get('model_type'))}, but it must be 'zaya'.")

    for key in _QUANTIZED:
        if tree.get(key):
            raise InputError(f"{where} has {key}, but quantized (FP8, MXFP4) and vision variants are not supported.")
    for key, values in fixed.items():
        if tree.get(key, values[0]) not in values:
            raise InputError(f"{where} has {key} {shown(tree[key])}, but only {shown(values[0])} is supported.")


def whole(tree: dict[str, Any], key: str, where: str) -> int:
    """Read a positive whole number."""
    if type(tree.get(key)) is not int or tree[key] < 1:
        raise InputError(f"{where} has {key} {shown(tree.get(key))}, but it must be a positive whole number.")
    return tree[key]


def window(tree: dict[str, Any], where: str) -> int | None:
    """Read the sliding window: keys that a query attends to, itself included; None if not given."""
    value = tree.get("sliding_window")
    if value is not None and type(value) is not int:
        raise InputError(f"{where} has sliding_window {shown(value)}, but it must be a whole number.")
    return value


def flag(tree: dict[str, Any], key: str, where: str) -> bool:
    """Read a boolean, false by default."""
    value = tree.get(key, False)
    if type(value) is not bool:
        raise InputError(f"{where} has {key} {shown(value)}, but it must be true or false.")
    return value


def number(tree: dict[str, Any], key: str, default: float, where: str) -> float:
    """Read a number."""
    value = tree.get(key, default)
    if type(value) not in (int, float) or not abs(value) <= _LARGEST:  # also rejects NaN
        raise InputError(f"{where} has {key} {shown(value)}, but it must be a number.")
    return float(value)


def _layer_types(tree: dict[str, Any], num_layers: int, where: str) -> list[str]:
    types = tree.get("layer_types")
    if types is None:
        types = ["hybrid"] * num_layers
    if not isinstance(types, list):
        raise InputError(f"{where} has layer_types {shown(types)}, but it must be a list.")
    if len(types) != num_layers:
        raise InputError(f"{where} has {len(types)} layer_types, but num_hidden_layers is {num_layers}.")
    for kind in types:
        if not isinstance(kind, str) or kind not in _KINDS:
            raise InputError(f"{where} has the layer type {shown(kind)}, but it must be one of {', '.join(_KINDS)}.")
    return types


def _rope(parameters: Any, types: list[str], where: str) -> tuple[dict[str, float], float]:
    """Return the RoPE base of each layer type, and the rotated fraction that all of them share."""
    bases, fractions = {"hybrid": 5.0e6, "hybrid_sliding": 1.0e4}, []
    parameters = {} if parameters is None else parameters
    # The released 8B has a meaningless rope_type next to the sections (docs/reference.md §12.1).
    known = {*_KINDS, "rope_type"}
    if not isinstance(parameters, dict) or not known.issuperset(parameters):
        raise InputError(f"{where} has rope_parameters {shown(parameters)}, but it must have the sections "
                         f"{', '.join(_KINDS)}.")  # fmt: skip
    for kind in dict.fromkeys(types):
        section = parameters.get(kind)
        section = {} if section is None else section
        if not isinstance(section, dict):
            raise InputError(f"{where} has rope_parameters.{kind} {shown(section)}, but it must be a section.")
        if section.get("rope_type", "default") != "default":
            raise InputError(f"{where} has rope_type {shown(section['rope_type'])}, but only 'default' is supported.")
        bases[kind] = number(section, "rope_theta", bases[kind], f"{where}, rope_parameters.{kind},")
        fractions.append(number(section, "partial_rotary_factor", 0.5, f"{where}, rope_parameters.{kind},"))
    if len(set(fractions)) > 1:
        raise InputError(f"{where} has different partial_rotary_factor values ({fractions}), but they must be equal.")
    return bases, fractions[0]


def to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the content of `config.json` for `transformers`.

    Raises:
      InputError: the architecture is an ablation that `transformers` cannot represent.
    """
    theirs = {kind: name for name, kind in _KINDS.items()}
    pattern = config.period * config.num_groups
    ropes = {"full": config.rope_base, "sliding": config.sliding_rope_base}
    return {
        **header(config, dtype, _FIXED),
        **{name: getattr(config, ours) for ours, name in _SIZES.items()},
        "layer_types": [theirs[kind] for kind in pattern],
        "sliding_window": config.sliding_window,
        "rope_parameters": {
            theirs[kind]: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": config.rotary_fraction}
            for kind, base in ropes.items()
        },
        "attention_bias": config.attention_bias,
        "lm_head_bias": config.head_bias,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
    }


def header(config: ModelConfig, dtype: str, fixed: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return the keys that start every `config.json`; `InputError` for ablations that the layouts cannot represent."""
    if unknown := set(config.layer_pattern).difference(_KINDS.values()):
        raise InputError(f"model.layer_pattern has {min(unknown)!r}, but only models whose layers are "
                         f"{' and '.join(_KINDS.values())} can be exported to transformers.")  # fmt: skip
    for key, value in _ONLY.items():
        if getattr(config, key) != value:
            raise InputError(f"model.{key} is {shown(getattr(config, key))}, but must be {shown(value)} to export to "
                             "transformers.")  # fmt: skip
    return {"architectures": ["ZayaForCausalLM"], "model_type": "zaya", "dtype": dtype,
            **{key: values[0] for key, values in fixed.items()}}  # fmt: skip
