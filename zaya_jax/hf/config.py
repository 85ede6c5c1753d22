"""Convert `config.json` of a `transformers` ZAYA folder to `ModelConfig` and back (docs/reference.md §12.1)."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

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
_ABLATIONS = "attention router residual_scaling convolutions query_key_mean value_shift router_layers depth_averaging"
_ONLY = {key: getattr(ModelConfig, key) for key in _ABLATIONS.split()}
_FIXED = {"hidden_act": ("silu",), "tie_word_embeddings": (True,), "num_experts_per_tok": (1,)}
_LARGEST = 1e300  # a larger integer would overflow a float
_QUANTIZED = ("quantization_config", "compression_config", "vision_config", "vision_lora")


class ConfigFile(NamedTuple):
    """The content of a `config.json`, whose values are checked when they are read."""

    tree: dict[str, Any]
    path: str  # its path, for messages

    def fail(self, problem: str) -> NoReturn:
        """Raise an `InputError` that says what the file has."""
        raise InputError(f"{self.path} has {problem}.")

    def read(self, key: str, allowed: str, is_allowed: Callable[[Any], bool], default: Any = None) -> Any:
        """Read a value; InputError unless it `is_allowed`, which `allowed` describes."""
        value = self.tree.get(key, default)
        if not is_allowed(value):
            self.fail(f"{key} {shown(value)}, but it must be {allowed}")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        """Read a positive whole number."""
        return self.read(key, "a positive whole number", lambda value: type(value) is int and value > 0, default)

    def number(self, key: str, default: float) -> float:
        """Read a number."""
        return float(self.read(key, "a number", _is_number, default))

    def flag(self, key: str) -> bool:
        """Read a boolean, false by default."""
        return self.read(key, "true or false", lambda value: type(value) is bool, False)

    def window(self) -> int | None:
        """Read the sliding window: keys that a query attends to, itself included; None if not given."""
        return self.read("sliding_window", "a whole number", lambda value: type(value) in (int, type(None)))

    def require_zaya(self, fixed: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise `InputError` for another model type, a quantized or vision variant, or other values of `fixed` keys."""
        self.read("model_type", "'zaya'", lambda value: value == "zaya")
        for key in _QUANTIZED:
            if self.tree.get(key):
                self.fail(f"{key}, but quantized (FP8, MXFP4) and vision variants are not supported")
        for key, values in fixed.items():
            if self.tree.get(key, values[0]) not in values:
                self.fail(f"{key} {shown(self.tree[key])}, but only {shown(values[0])} is supported")

    def build(self, **fields: Any) -> ModelConfig:
        """Build and check a configuration."""
        config = ModelConfig(**fields)
        try:
            config.check()
        except InputError as error:
            raise InputError(f"{self.path} describes an invalid model: {error}") from error
        return config


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _LARGEST  # also rejects NaN


def from_hf(tree: dict[str, Any], path: str) -> ModelConfig:
    """Parse the architecture in the `config.json` at `path`; `InputError` if a key is missing or not supported."""
    file = ConfigFile(tree, path)
    file.require_zaya(_FIXED)
    sizes = {ours: file.whole(theirs) for ours, theirs in _SIZES.items()}
    types = _layer_types(file, sizes["num_layers"])
    bases, fraction = _rope(file, types)
    return file.build(
        **sizes,
        layer_pattern=tuple(_KINDS[kind] for kind in types),
        sliding_window=file.window() if "hybrid_sliding" in types else None,
        rope_base=bases["hybrid"],
        sliding_rope_base=bases["hybrid_sliding"],
        rotary_fraction=fraction,
        attention_bias=file.flag("attention_bias"),
        head_bias=file.flag("lm_head_bias"),
        norm_eps=file.number("rms_norm_eps", 1e-5),
        init_std=file.number("initializer_range", 0.02),
    )


def _layer_types(file: ConfigFile, num_layers: int) -> list[str]:
    types = file.read("layer_types", "a list", lambda value: isinstance(value, list | None))
    types = ["hybrid"] * num_layers if types is None else types
    if len(types) != num_layers:
        file.fail(f"{len(types)} layer_types, but num_hidden_layers is {num_layers}")
    for kind in types:
        if not isinstance(kind, str) or kind not in _KINDS:
            file.fail(f"the layer type {shown(kind)}, but it must be one of {', '.join(_KINDS)}")
    return types


def _rope(file: ConfigFile, types: list[str]) -> tuple[dict[str, float], float]:
    """Return the RoPE base of each layer type, and the rotated fraction that all of them share."""
    bases, fractions = {"hybrid": 5.0e6, "hybrid_sliding": 1.0e4}, []
    # The released 8B has a meaningless rope_type next to the sections (docs/reference.md §12.1).
    known = {*_KINDS, "rope_type"}
    parameters = file.tree.get("rope_parameters")
    parameters = {} if parameters is None else parameters
    if not isinstance(parameters, dict) or not known.issuperset(parameters):
        file.fail(f"rope_parameters {shown(parameters)}, but it must have the sections {', '.join(_KINDS)}")
    for kind in dict.fromkeys(types):
        section = parameters.get(kind)
        section = {} if section is None else section
        if not isinstance(section, dict):
            file.fail(f"rope_parameters.{kind} {shown(section)}, but it must be a section")
        if section.get("rope_type", "default") != "default":
            file.fail(f"rope_type {shown(section['rope_type'])}, but only 'default' is supported")
        values = ConfigFile(section, f"{file.path}, rope_parameters.{kind},")
        bases[kind] = values.number("rope_theta", bases[kind])
        fractions.append(values.number("partial_rotary_factor", 0.5))
    if len(set(fractions)) > 1:
        file.fail(f"different partial_rotary_factor values ({fractions}), but they must be equal")
    return bases, fractions[0]


def to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the content of `config.json`; `InputError` for an ablation that `transformers` cannot represent."""
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
        kinds = " and ".join(_KINDS.values())
        only = f"only models whose layers are {kinds} can be exported to transformers"
        raise InputError(f"model.layer_pattern has {min(unknown)!r}, but {only}.")
    for key, value in _ONLY.items():
        if getattr(config, key) != value:
            values = f"{shown(getattr(config, key))}, but must be {shown(value)}"
            raise InputError(f"model.{key} is {values} to export to transformers.")
    own = {"architectures": ["ZayaForCausalLM"], "model_type": "zaya", "dtype": dtype}
    return own | {key: values[0] for key, values in fixed.items()}
