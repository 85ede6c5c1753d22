"""`config.json` of a `transformers` ZAYA folder to `ModelConfig` and back (zaya1.md §12.1)."""

from collections.abc import Mapping
from typing import Any

from zaya_jax.config import ModelConfig
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
_ONLY = {"attention": "cca", "router": "zaya", "residual_scaling": True}
_FIXED = {"hidden_act": ("silu",), "tie_word_embeddings": (True,), "num_experts_per_tok": (1,)}
_LARGEST = 1e300  # of a number: a longer integer is no float
_QUANTIZED = ("quantization_config", "compression_config", "vision_config", "vision_lora")


def from_hf(tree: dict[str, Any], where: str) -> ModelConfig:
    """The architecture a `config.json` describes.

    Raises:
      InputError: a key is missing or has a value this model has no form of; `where` is named.
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
    """The configuration of these fields, found to be one that can be."""
    config = ModelConfig(**fields)
    try:
        config.check()
    except InputError as error:
        raise InputError(f"{where} describes no model that can be: {error}") from error
    return config


def require_zaya(tree: dict[str, Any], fixed: Mapping[str, tuple[Any, ...]], where: str) -> None:
    """Refuse another model, and a ZAYA with more or other weights than this one or another value of a `fixed` key."""
    if tree.get("model_type") != "zaya":
        raise InputError(f"{where} has model_type {tree.get('model_type')!r:.200}, but must have 'zaya'.")

    for key in _QUANTIZED:
        if tree.get(key):
            raise InputError(f"{where} has {key}, but quantized (FP8, MXFP4) and vision variants are not supported.")
    for key, values in fixed.items():
        if tree.get(key, values[0]) not in values:
            raise InputError(f"{where} has {key} {tree[key]!r:.200}, but only {values[0]!r} is supported.")


def whole(tree: dict[str, Any], key: str, where: str) -> int:
    """A size."""
    if type(tree.get(key)) is not int or tree[key] < 1:
        raise InputError(f"{where} has {key} {tree.get(key)!r:.200}, but must have a positive whole number.")
    return tree[key]


def window(tree: dict[str, Any], where: str) -> int | None:
    """The tokens that a query of a sliding layer sees, itself included; None where it is not given."""
    value = tree.get("sliding_window")
    if value is not None and type(value) is not int:
        raise InputError(f"{where} has sliding_window {value!r:.200}, but must have a whole number.")
    return value


def flag(tree: dict[str, Any], key: str, where: str) -> bool:
    """True or false; false where it is not given."""
    value = tree.get(key, False)
    if type(value) is not bool:
        raise InputError(f"{where} has {key} {value!r:.200}, but must have true or false.")
    return value


def number(tree: dict[str, Any], key: str, default: float, where: str) -> float:
    """A number; `default` where it is not given."""
    value = tree.get(key, default)
    if type(value) not in (int, float) or not abs(value) <= _LARGEST:  # NaN is not, either
        raise InputError(f"{where} has {key} {value!r:.200}, but must have a number.")
    return float(value)


def _layer_types(tree: dict[str, Any], num_layers: int, where: str) -> list[str]:
    types = tree.get("layer_types")
    if types is None:
        types = ["hybrid"] * num_layers
    if not isinstance(types, list):
        raise InputError(f"{where} has layer_types {types!r:.200}, but must have a list.")
    if len(types) != num_layers:
        raise InputError(f"{where} has {len(types)} layer_types for {num_layers} layers.")
    for kind in types:
        if not isinstance(kind, str) or kind not in _KINDS:
            raise InputError(f"{where} has the layer type {kind!r:.200}, but supported are {', '.join(_KINDS)}.")
    return types


def _rope(parameters: Any, types: list[str], where: str) -> tuple[dict[str, float], float]:
    """Base of each kind of layer and the rotated fraction, which all kinds share."""
    bases, fractions = {"hybrid": 5.0e6, "hybrid_sliding": 1.0e4}, []
    parameters = {} if parameters is None else parameters
    # A rope_type beside the sections is in the released 8B's file and means nothing (zaya1.md §12.1).
    known = {*_KINDS, "rope_type"}
    if not isinstance(parameters, dict) or not known.issuperset(parameters):
        raise InputError(f"{where} has rope_parameters {parameters!r:.200}, but must have sections "
                         f"{', '.join(_KINDS)}.")  # fmt: skip
    for kind in dict.fromkeys(types):
        section = parameters.get(kind)
        section = {} if section is None else section
        if not isinstance(section, dict):
            raise InputError(f"{where} has rope_parameters {section!r:.200} for {kind}, but must have a section.")
        if section.get("rope_type", "default") != "default":
            raise InputError(f"{where} has rope_type {section['rope_type']!r:.200}, but only 'default' is supported.")
        bases[kind] = number(section, "rope_theta", bases[kind], f"{where}, rope_parameters.{kind},")
        fractions.append(number(section, "partial_rotary_factor", 0.5, f"{where}, rope_parameters.{kind},"))
    if len(set(fractions)) > 1:
        raise InputError(f"{where} rotates different fractions ({fractions}) in different layers; one is supported.")
    return bases, fractions[0]


def to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """What `transformers` reads as the same architecture.

    Raises:
      InputError: a part of ZAYA1 is taken away, of which `transformers` has no form; its key is named.
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
    """What every `config.json` begins with; refuses a part of ZAYA1 taken away, of which the folders have no form."""
    if unknown := set(config.layer_pattern).difference(_KINDS.values()):
        raise InputError(f"model.layer_pattern has {min(unknown)!r}, but a model can be written for transformers only "
                         f"where its layers are {' and '.join(_KINDS.values())}.")  # fmt: skip
    for key, value in _ONLY.items():
        if getattr(config, key) != value:
            raise InputError(f"model.{key} is {getattr(config, key)!r}, but a model can be written for transformers "
                             f"only where it is {value!r}.")  # fmt: skip
    return {"architectures": ["ZayaForCausalLM"], "model_type": "zaya", "dtype": dtype,
            **{key: values[0] for key, values in fixed.items()}}  # fmt: skip
