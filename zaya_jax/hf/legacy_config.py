"""Convert `config.json` of a legacy ZAYA folder to `ModelConfig` and back (docs/reference.md §12.2, §12.3).

There are two dialects: the released 8B has a number per key, ZAYA1-base a list per key with one entry per sublayer.
Our decisions where the sources are silent:
- `zaya_layers`, if present, sets the number of sublayers and overrides `num_hidden_layers`.
- `cca_num_q_heads`, if present, is the number of query heads; `num_attention_heads` is then the number before
  compression, which gives the head size if neither `head_dim` nor `kv_channels` does.
- Lists can have surplus entries, which are ignored; all sublayers of a kind must agree.
- All sliding layers must have the same window. The legacy value excludes the current token, so a window of one token
  cannot be written.
- Unknown keys with a ZAYA prefix (`_OWN`) are rejected, because they might change the computation. Of the other keys,
  only those like `quantization_config` are rejected.
"""

from collections.abc import Sequence
from typing import Any

from zaya_jax.config import ModelConfig
from zaya_jax.config.checks import shown
from zaya_jax.config.model import AttentionKind
from zaya_jax.errors import InputError
from zaya_jax.hf.config import ConfigFile, header

_FIXED: dict[str, tuple[Any, ...]] = {  # supported values; the first is written
    "cca": (True,),
    "activation_func": ("swiglu",),
    "normalization": ("RMSNorm",),
    "gated_linear_unit": (True,),
    "add_bias_linear": (False,),
    "clamp_temp": (False,),
    "moe_router_topk": (1,),
    "scale_residual_merge": (True,),
    "zaya_use_eda": (True,),
    "zaya_use_mod": (True,),
    "tie_word_embeddings": (True,),
    "rope_scaling": (False, None),
}
# Keys without effect on the architecture.
_OBSOLETE = {"zaya_high_prec", "num_experts_per_tok", "num_attention_heads_list", "rope_type"}
_OWN = ("zaya_", "cca_", "moe_", "swa_", "rope_", "rotary_", "num_", "ffn_", "router_", "smoe_")
_SLIDING = {"full_attention": "full", "hybrid": "full", "sliding_attention": "sliding", "hybrid_sliding": "sliding"}

_WRITTEN = {  # theirs: ours
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_query_heads",
    "num_key_value_heads": "num_kv_heads",
    "num_query_groups": "num_kv_heads",
    "head_dim": "head_dim",
    "kv_channels": "head_dim",
    "num_experts": "num_experts",
    "zaya_mlp_expansion": "router_size",
    "max_position_embeddings": "max_positions",
    "cca_time0": "depthwise_kernel",
    "cca_time1": "grouped_kernel",
    "swa_rotary_base": "sliding_rope_base",
    "rope_theta": "rope_base",
    "partial_rotary_factor": "rotary_fraction",
    "attention_bias": "attention_bias",
    "lm_head_bias": "head_bias",
    "norm_epsilon": "norm_eps",
    "initializer_range": "init_std",
}

_READ = {*_WRITTEN, "num_hidden_layers", "num_query_groups_list", "ffn_hidden_size", "ffn_hidden_size_list"}
_READ |= {"zaya_layers", "cca_num_q_heads", "swa_layers", "rotary_base", "rope_pct"}


def from_legacy(tree: dict[str, Any], path: str) -> ModelConfig:
    """Parse the architecture in a legacy `config.json`, see `from_hf`; unknown keys of ZAYA are rejected, too."""
    file = ConfigFile(tree, path)
    file.require_zaya(_FIXED)
    for key in tree:
        if key.startswith(_OWN) and key not in _READ | _OBSOLETE | set(_FIXED):
            file.fail(f"the unknown key {key}, which might change what the model computes")
    sublayers = _sublayers(file)
    attention, mixture = range(0, sublayers, 2), range(1, sublayers, 2)
    heads, hidden = file.whole("num_attention_heads"), file.whole("hidden_size")
    width = tree.get("head_dim") or tree.get("kv_channels")
    fused = _read_size(file, ("ffn_hidden_size_list", "ffn_hidden_size"), mixture)
    if fused % 2:
        file.fail(f"ffn_hidden_size {fused}, but it must be even (gate and up)")
    pattern, sliding_window = _windows(file, sublayers)
    return file.build(
        vocab_size=file.whole("vocab_size"),
        hidden_size=hidden,
        num_layers=sublayers // 2,
        num_query_heads=_read_size(file, ("cca_num_q_heads", "num_attention_heads"), attention),
        num_kv_heads=_read_size(file, ("num_query_groups_list", "num_query_groups", "num_key_value_heads"), attention),
        head_dim=hidden // heads if width is None else ConfigFile({"head_dim": width}, path).whole("head_dim"),
        num_experts=_read_size(file, ("zaya_layers", "num_experts"), mixture),
        expert_size=fused // 2,
        router_size=_read_size(file, ("zaya_mlp_expansion",), mixture),
        max_positions=file.whole("max_position_embeddings"),
        depthwise_kernel=file.whole("cca_time0", 2),
        grouped_kernel=file.whole("cca_time1", 2),
        layer_pattern=pattern,
        sliding_window=sliding_window,
        rope_base=file.number("rope_theta" if "rope_theta" in tree else "rotary_base", 5.0e6),
        sliding_rope_base=file.number("swa_rotary_base", 1.0e4),
        rotary_fraction=file.number("partial_rotary_factor" if "partial_rotary_factor" in tree else "rope_pct", 0.5),
        attention_bias=file.flag("attention_bias"),
        head_bias=file.flag("lm_head_bias"),
        norm_eps=file.number("norm_epsilon", 1e-5),
        init_std=file.number("initializer_range", 0.02),
    )


def _sublayers(file: ConfigFile) -> int:
    layers = file.tree.get("zaya_layers")
    if layers is None:
        count = file.whole("num_hidden_layers")
        if count % 2:
            file.fail(f"num_hidden_layers {count}, but it must be even: attention and experts alternate")
        return count
    alternates = isinstance(layers, list) and layers and layers[::2] == ["a"] * (len(layers) // 2)
    if not alternates or any(type(experts) is not int for experts in layers[1::2]):
        file.fail(f"zaya_layers {shown(layers)}, but it must alternate 'a' and a number of experts")
    return len(layers)


def _read_size(file: ConfigFile, keys: Sequence[str], at: range) -> int:
    """Read the size under the first of `keys` that is present; in a list, the entries `at` must agree."""
    key = next((key for key in keys if file.tree.get(key) is not None), keys[-1])
    entries = file.tree.get(key)
    if not isinstance(entries, list):
        return file.whole(key)
    if len(entries) <= at[-1]:
        file.fail(f"{len(entries)} entries in {key}, but needs at least {at[-1] + 1}, one per sublayer")
    values = [entries[index] for index in at]
    if any(value != values[0] for value in values):
        file.fail(f"different {key} in different layers ({shown(values)}), but they must be equal")
    return ConfigFile({key: values[0]}, file.path).whole(key)


def _windows(file: ConfigFile, sublayers: int) -> tuple[tuple[AttentionKind, ...], int | None]:
    """Return the kind of each layer, and the sliding window with the query itself included."""
    layers = sublayers // 2

    def by_layer(key: str) -> list[Any] | None:
        entries = file.tree.get(key)
        if entries is None:
            return None
        if not isinstance(entries, list) or (len(entries) < sublayers and len(entries) != layers):
            lengths = f"one entry per sublayer ({sublayers}) or per layer ({layers})"
            file.fail(f"{key} {shown(entries)}, but it must be a list with {lengths}")
        return entries if len(entries) == layers else entries[:sublayers:2]

    windows = by_layer("swa_layers") or [0] * layers
    if any(type(tokens) is not int or tokens < 0 for tokens in windows):
        allowed = "list the tokens each layer looks back (0 for full attention)"
        file.fail(f"swa_layers {shown(windows)}, but it must {allowed}")
    kinds: list[Any] = ["sliding" if tokens else "full" for tokens in windows]
    if (types := by_layer("layer_types")) is not None:
        if any(not isinstance(name, str) or name not in _SLIDING for name in types):
            file.fail(f"layer_types {shown(types)}, but each must be one of {', '.join(_SLIDING)}")
        kinds = [_SLIDING[name] for name in types]
    spans = {tokens for tokens, kind in zip(windows, kinds, strict=True) if tokens and kind == "sliding"}
    if len(spans) > 1:
        file.fail(f"swa_layers of different widths ({sorted(spans)}), but they must be equal")
    width = file.window()
    if width is None and spans:
        width = spans.pop() + 1
    return tuple(kinds), width if "sliding" in kinds else None


def to_legacy(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the content of a `config.json` in the released 8B's dialect; `InputError` if it cannot represent it."""
    described = header(config, dtype, _FIXED)
    pattern = config.period * config.num_groups
    sliding = "sliding" in pattern
    if sliding and config.sliding_window == 1:
        problem = "which the legacy layout cannot represent (it stores the window minus 1, and 0 means full attention)"
        raise InputError(f"model.sliding_window is 1, {problem}; export with --layout hf.")
    back = (config.sliding_window or 1) - 1
    return {
        **described,
        **{key: getattr(config, ours) for key, ours in _WRITTEN.items()},
        "num_hidden_layers": 2 * config.num_layers,
        "ffn_hidden_size": 2 * config.expert_size,
        "swa_layers": [tokens for kind in pattern for tokens in (back * (kind == "sliding"), 0)] if sliding else None,
        "sliding_window": None,  # given by swa_layers
        "residual_in_fp32": True,
        "zaya_high_prec": True,
    }
