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
from zaya_jax.hf.config import build, flag, header, number, require_zaya, whole, window

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
_READ = {"num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_query_groups", "num_experts",
         "num_query_groups_list", "ffn_hidden_size", "ffn_hidden_size_list", "zaya_layers", "zaya_mlp_expansion",
         "cca_num_q_heads", "cca_time0", "cca_time1", "swa_layers", "swa_rotary_base", "rope_theta", "rotary_base",
         "rope_pct"}  # fmt: skip
# Keys without effect on the architecture.
_OBSOLETE = {"zaya_high_prec", "num_experts_per_tok", "num_attention_heads_list", "rope_type"}
_OWN = ("zaya_", "cca_", "moe_", "swa_", "rope_", "rotary_", "num_", "ffn_", "router_", "smoe_")
_SLIDING = {"full_attention": "full", "hybrid": "full", "sliding_attention": "sliding", "hybrid_sliding": "sliding"}


def from_legacy(tree: dict[str, Any], where: str) -> ModelConfig:
    """Parse the architecture of a legacy folder's `config.json`.

    Args:
      tree: content of the file.
      where: its path, for messages.

    Raises:
      InputError: a key is missing or unknown, or its value is not supported.
    """
    require_zaya(tree, _FIXED, where)
    for key in tree:
        if key.startswith(_OWN) and key not in _READ | _OBSOLETE | set(_FIXED):
            raise InputError(f"{where} has the unknown key {key}, which might change what the model computes.")
    sublayers = _sublayers(tree, where)
    attention, mixture = range(0, sublayers, 2), range(1, sublayers, 2)
    heads = whole(tree, "num_attention_heads", where)
    hidden = whole(tree, "hidden_size", where)
    width = tree.get("head_dim") or tree.get("kv_channels")
    fused = _one_of(tree, ("ffn_hidden_size_list", "ffn_hidden_size"), mixture, where)
    if fused % 2:
        raise InputError(f"{where} has ffn_hidden_size {fused}, but it must be even (gate and up).")
    pattern, sliding_window = _windows(tree, sublayers, where)
    sizes = {
        "vocab_size": whole(tree, "vocab_size", where),
        "hidden_size": hidden,
        "num_layers": sublayers // 2,
        "num_query_heads": _one_of(tree, ("cca_num_q_heads", "num_attention_heads"), attention, where),
        "num_kv_heads": _one_of(tree, ("num_query_groups_list", "num_query_groups", "num_key_value_heads"), attention,
                                where),
        "head_dim": hidden // heads if width is None else whole({"head_dim": width}, "head_dim", where),
        "num_experts": _one_of(tree, ("zaya_layers", "num_experts"), mixture, where),
        "expert_size": fused // 2,
        "router_size": _one_of(tree, ("zaya_mlp_expansion",), mixture, where),
        "max_positions": whole(tree, "max_position_embeddings", where),
        "depthwise_kernel": whole({"cca_time0": tree.get("cca_time0", 2)}, "cca_time0", where),
        "grouped_kernel": whole({"cca_time1": tree.get("cca_time1", 2)}, "cca_time1", where),
    }  # fmt: skip
    return build(
        where, **sizes, layer_pattern=pattern, sliding_window=sliding_window,
        rope_base=number(tree, "rope_theta" if "rope_theta" in tree else "rotary_base", 5.0e6, where),
        sliding_rope_base=number(tree, "swa_rotary_base", 1.0e4, where),
        rotary_fraction=number(tree, "partial_rotary_factor" if "partial_rotary_factor" in tree else "rope_pct", 0.5,
                               where),
        attention_bias=flag(tree, "attention_bias", where), head_bias=flag(tree, "lm_head_bias", where),
        norm_eps=number(tree, "norm_epsilon", 1e-5, where),
        init_std=number(tree, "initializer_range", 0.02, where),
    )  # fmt: skip


def _sublayers(tree: dict[str, Any], where: str) -> int:
    layers = tree.get("zaya_layers")
    if layers is None:
        count = whole(tree, "num_hidden_layers", where)
        if count % 2:
            raise InputError(f"{where} has num_hidden_layers {count}, but it must be even: attention and experts "
                             "alternate.")  # fmt: skip
        return count
    if (not isinstance(layers, list) or not layers or len(layers) % 2 or layers[::2] != ["a"] * (len(layers) // 2)
            or any(type(experts) is not int for experts in layers[1::2])):  # fmt: skip
        raise InputError(f"{where} has zaya_layers {shown(layers)}, but it must alternate 'a' and a number of experts.")
    return len(layers)


def _one_of(tree: dict[str, Any], keys: Sequence[str], at: range, where: str) -> int:
    """Read the size under the first of `keys` that is present; in a list, the entries `at` must agree."""
    key = next((key for key in keys if tree.get(key) is not None), keys[-1])
    entries = tree.get(key)
    if not isinstance(entries, list):
        return whole(tree, key, where)
    if len(entries) <= at[-1]:
        raise InputError(f"{where} has {len(entries)} entries in {key}, but needs at least {at[-1] + 1}, one per "
                         "sublayer.")  # fmt: skip
    values = [entries[index] for index in at]
    if any(value != values[0] for value in values):
        raise InputError(f"{where} has different {key} in different layers ({shown(values)}), but they must be equal.")
    return whole({key: values[0]}, key, where)


def _windows(tree: dict[str, Any], sublayers: int, where: str) -> tuple[tuple[AttentionKind, ...], int | None]:
    """Return the kind of each layer, and the sliding window with the query itself included."""

    def by_layer(key: str) -> list[Any]:
        entries, layers = tree[key], sublayers // 2
        if not isinstance(entries, list) or (len(entries) < sublayers and len(entries) != layers):
            raise InputError(f"{where} has {key} {shown(entries)}, but it must be a list with one entry per sublayer "
                             f"({sublayers}) or per layer ({layers}).")  # fmt: skip
        return entries if len(entries) == layers else entries[:sublayers:2]

    windows = [0] * (sublayers // 2) if tree.get("swa_layers") is None else by_layer("swa_layers")
    if any(type(tokens) is not int or tokens < 0 for tokens in windows):
        raise InputError(f"{where} has swa_layers {shown(windows)}, but it must list the tokens each layer looks back "
                         "(0 for full attention).")  # fmt: skip
    kinds: list[Any] = ["sliding" if tokens else "full" for tokens in windows]
    if tree.get("layer_types") is not None:
        types = by_layer("layer_types")
        if any(not isinstance(name, str) or name not in _SLIDING for name in types):
            raise InputError(f"{where} has layer_types {shown(types)}, but each must be one of {', '.join(_SLIDING)}.")
        kinds = [_SLIDING[name] for name in types]
    spans = {tokens for tokens, kind in zip(windows, kinds, strict=True) if tokens and kind == "sliding"}
    if len(spans) > 1:
        raise InputError(f"{where} has swa_layers of different widths ({sorted(spans)}), but they must be equal.")
    width = window(tree, where)
    if width is None and spans:
        width = spans.pop() + 1
    return tuple(kinds), width if "sliding" in kinds else None


def to_legacy(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the content of a legacy `config.json`, in the released 8B's dialect.

    Raises:
      InputError: the legacy layout cannot represent the architecture.
    """
    described = header(config, dtype, _FIXED)
    pattern = config.period * config.num_groups
    sliding = "sliding" in pattern
    if sliding and config.sliding_window == 1:
        raise InputError("model.sliding_window is 1, which the legacy layout cannot represent (it stores the window "
                         "minus 1, and 0 means full attention); export with --layout hf.")  # fmt: skip
    back = (config.sliding_window or 1) - 1
    return {
        **described,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": 2 * config.num_layers,
        "num_attention_heads": config.num_query_heads,
        "num_key_value_heads": config.num_kv_heads,
        "num_query_groups": config.num_kv_heads,
        "head_dim": config.head_dim,
        "kv_channels": config.head_dim,
        "num_experts": config.num_experts,
        "ffn_hidden_size": 2 * config.expert_size,
        "zaya_mlp_expansion": config.router_size,
        "max_position_embeddings": config.max_positions,
        "cca_time0": config.depthwise_kernel,
        "cca_time1": config.grouped_kernel,
        "swa_layers": [tokens for kind in pattern for tokens in (back * (kind == "sliding"), 0)] if sliding else None,
        "swa_rotary_base": config.sliding_rope_base,
        "sliding_window": None,  # given by swa_layers
        "rope_theta": config.rope_base,
        "partial_rotary_factor": config.rotary_fraction,
        "attention_bias": config.attention_bias,
        "lm_head_bias": config.head_bias,
        "norm_epsilon": config.norm_eps,
        "initializer_range": config.init_std,
        "residual_in_fp32": True,
        "zaya_high_prec": True,
    }
