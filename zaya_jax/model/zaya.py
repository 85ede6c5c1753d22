"""The whole model: embedding, scan over layers, final norm (docs/reference.md §1.2)."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from zaya_jax.config import ModelConfig
from zaya_jax.config.model import LayerKind
from zaya_jax.config.phases import Remat
from zaya_jax.errors import InputError
from zaya_jax.model.attention import Context
from zaya_jax.model.cca import CCA
from zaya_jax.model.experts import MixtureOfExperts
from zaya_jax.model.gqa import GQA
from zaya_jax.model.hf_names import HfTensor, same, within
from zaya_jax.model.layers import Carrier, ResidualScaling, RMSNorm, fused_merge, param, rotary_table, segment_positions
from zaya_jax.model.packing import pack_small
from zaya_jax.ops import LOCAL, Ops
from zaya_jax.ops.cached_attention import count_kept, new_slots, write_slots
from zaya_jax.ops.embedding import embed
from zaya_jax.ops.names import MATMUL_OUTPUT
from zaya_jax.ops.norm import rms_norm
from zaya_jax.ops.parts import LAYERS, part
from zaya_jax.ops.precision import accumulation_dtype

POLICIES = {
    "dots": jax.checkpoint_policies.save_only_these_names(MATMUL_OUTPUT),
    "full": jax.checkpoint_policies.nothing_saveable,
}

Maybe = jax.Array | None
ATTENTION = {"cca": CCA, "gqa": GQA, "gqa_qk_norm": GQA}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Decode state of the whole model, whose rows differ in length."""

    layers: tuple[Any, ...]  # for each layer, the state of `Attention.init_cache`
    segments_bt: jax.Array  # int32 document of each cached token; 0 where empty
    length_b: jax.Array  # int32, number of tokens of each row

    @property
    def capacity(self) -> int:
        """Number of tokens that a row of the cache can hold."""
        return self.segments_bt.shape[1]


class Stats(NamedTuple):
    """`expert_counts_le`, int32 [l, e + 1]: tokens that each layer sent to each expert, skip last."""

    expert_counts_le: jax.Array


class ModelOutput(NamedTuple):
    """The output of the final norm, `hidden_bsd`; `stats`; and the new `cache`, None without one."""

    hidden_bsd: jax.Array
    stats: Stats
    cache: Cache | None


class LayerOutput(NamedTuple):
    """The results of a layer."""

    out_bsd: jax.Array  # fp32 residual stream
    state_bsr: jax.Array  # of the router, for the next layer's
    counts_e: jax.Array  # int32 [e + 1], tokens of each class, skip last
    cache: Any  # decode state; None without one
    carrier: Carrier  # for the next norm; in decode with its value


class Block(nnx.Module):
    """One layer: attention, then the mixture of experts, each with a norm before and a residual merge after."""

    def __init__(self, config: ModelConfig, layer: LayerKind, key: jax.Array) -> None:
        key_attention, key_mixture = jax.random.split(key)
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = ATTENTION[layer.attention](config, layer, key_attention)
        self.attention_merge = ResidualScaling(config.hidden_size) if config.residual_scaling else None
        self.mixture_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixture = MixtureOfExperts(config, key_mixture)
        self.mixture_merge = ResidualScaling(config.hidden_size) if config.residual_scaling else None

    def __call__(
        self, x_bsd: jax.Array, state_bsr: jax.Array, context: Context, cache: Any, ops: Ops, carrier: Carrier,
        following_d: jax.Array,
    ) -> LayerOutput:  # fmt: skip
        """Run the layer on the residual stream, with the router's state of the layer before and the decode state.

        `carrier` is for the norm before attention, `following_d` the weight of the norm after the layer. With a decode
        state, the carrier's value is that norm, and the merge computes the next one in the same pass.
        """
        dtype, decoded = self.attention.query.dtype, cache is not None
        with part("norm"):
            h_bsd = carrier.value if decoded else self.attention_norm(x_bsd, dtype, carrier)
        with part("attention"):
            out, cache = self.attention(h_bsd, context, cache, ops)
        with part("norm"):
            terms = out, x_bsd, self.attention_merge and self.attention_merge.vectors
            x_bsd, h_bsd = ops.residual_norm(*terms, self.mixture_norm.weight[...], self.mixture_norm.eps, dtype)
        with part("experts"):
            mixed = self.mixture(h_bsd, state_bsr, context.segments_bs, ops)
        with part("norm"):
            terms = mixed.out_bsd, x_bsd, self.mixture_merge and self.mixture_merge.vectors
            if decoded:
                x_bsd, h_bsd = ops.residual_norm(*terms, following_d, self.mixture_norm.eps, dtype)
                carrier = Carrier(h_bsd)
            else:
                x_bsd, carrier = fused_merge(ops, self.mixture_norm.eps, terms, following_d, carrier, mixed.kept)
        return LayerOutput(x_bsd, mixed.state_bsr, mixed.counts_e, cache, carrier)

    @staticmethod
    def hf_tensors(config: ModelConfig, layer: LayerKind) -> Iterator[HfTensor]:
        """Yield the tensors of one layer in a `transformers` folder."""
        d = config.hidden_size
        yield same("input_layernorm.weight", "attention_norm.weight", d)
        yield same("post_attention_layernorm.weight", "mixture_norm.weight", d)
        yield from within("attention_merge", ResidualScaling.hf_tensors("attention", d))
        yield from within("mixture_merge", ResidualScaling.hf_tensors("mlp", d))
        yield from within("attention", ATTENTION[layer.attention].hf_tensors(config))
        yield from within("mixture", MixtureOfExperts.hf_tensors(config))


class Zaya(nnx.Module):
    """The ZAYA1 model. Layer parameters are stacked, one stack for each position in the layer pattern's period.

    The module is a pytree without side effects, so plain `jax.jit`, `jax.grad` and `jax.vmap` work.
    """

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        """Draw fp32 parameters: `layers.matrix` for matrices, N(0, init_std²) for the embedding, ones and zeros."""
        config.check()
        key_embed, key_blocks = jax.random.split(key)
        embedding = config.init_std * jax.random.normal(key_embed, (config.vocab_size, config.hidden_size), jnp.float32)
        self.embedding = param(embedding, "embedding")
        if config.residual_scaling:
            self.input_scale = param(jnp.ones(config.hidden_size), "scale")
            self.input_bias = param(jnp.zeros(config.hidden_size), "bias")
        stacks = []
        for position, layer in enumerate(config.layer_kinds):
            keys = jax.random.split(jax.random.fold_in(key_blocks, position), config.num_groups)
            # `lax.map`, since vmap multiplies the compile time of random draws.
            stacks.append(jax.jit(functools.partial(jax.lax.map, functools.partial(Block, config, layer)))(keys))
        self.blocks = nnx.List(stacks)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        if config.head_bias:
            self.head_bias = param(jnp.zeros(config.vocab_size), "bias")
        self.config = config

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of matrices and activations; the residual stream is fp32.

        It is read from the embedding, since layers may be stored in another dtype until `Ops.gather_layer`.
        """
        return self.embedding.dtype

    def __call__(
        self, tokens_bs: jax.Array, segment_ids: Maybe = None, positions: Maybe = None, *,
        ops: Ops = LOCAL, cache: Cache | None = None, remat: Remat = "none", dtype: DTypeLike | None = None,
    ) -> ModelOutput:  # fmt: skip
        """Run the model; `hidden_bsd` of the output has the compute dtype.

        Args:
          tokens_bs: int32 token ids.
          segment_ids: int32 [b, s], the document of each token; 0 is padding. Tokens of different documents do not
            attend to each other. A document must be contiguous in its row. None for one document per row.
          positions: int32 [b, s]; None to count from the start of each document.
          ops: implementations of the operations.
          cache: decode state that the tokens follow, in prefill as in decode; equal segment ids continue a document.
            Padding at the end of a row is not kept, so that rows can have different numbers of new tokens. The caller
            must ensure that `cache.length_b` plus the new tokens fit its capacity; what does not fit is lost.
          remat: rematerialization policy of the backward pass.
          dtype: compute dtype of the activations; None for the embedding's. Training passes it with an fp32 embedding,
            whose rows are rounded after the lookup, so that the lookup's gradient is summed in fp32.

        `InputError` if sequence or cache is longer than `config.max_positions`, or the sequence than the cache.
        """
        config, dtype = self.config, self.dtype if dtype is None else dtype
        longest = tokens_bs.shape[1] if cache is None else cache.capacity
        if longest > config.max_positions:
            most = f"model.max_positions allows at most {config.max_positions}"
            raise InputError(f"The sequence is {longest} tokens long, but {most}.")
        if cache is not None and tokens_bs.shape[1] > cache.capacity:
            raise InputError(f"{tokens_bs.shape[1]} tokens do not fit in the cache, which holds {cache.capacity}.")
        if segment_ids is None:
            segment_ids = jnp.ones(tokens_bs.shape, jnp.int32)
        context, cache = self._context(segment_ids, positions, cache, ops)
        with part("embedding"):
            x_bsd = embed(self.embedding[...], tokens_bs).astype(dtype)
            x_bsd = x_bsd.astype(accumulation_dtype(dtype))
            if config.residual_scaling:
                x_bsd = (x_bsd + self.input_bias[...].astype(x_bsd.dtype)) * self.input_scale[...].astype(x_bsd.dtype)
        start = x_bsd, jnp.zeros((*tokens_bs.shape, config.router_size), x_bsd.dtype)
        with part(LAYERS):
            if cache is None:
                x_bsd, counts, carrier = _scan(self.blocks, self.norm, start, dtype, context, ops, remat)
                with part("norm"):
                    hidden_bsd = self.norm(x_bsd, dtype, carrier)
            else:
                hidden_bsd, counts, cache = _decode(layer_blocks(self), self.norm, start, dtype, context, ops, cache)
        stats = Stats(counts.reshape(config.num_layers, config.num_experts + 1))
        return ModelOutput(hidden_bsd, stats, cache)

    def _context(
        self, segments_bs: jax.Array, positions_bs: jax.Array | None, cache: Cache | None, ops: Ops
    ) -> tuple[Context, Cache | None]:
        """Make the layers' `Context`, and the cache with the documents of the new tokens."""
        config = self.config
        bases = dict.fromkeys(layer.rope_base for layer in config.layer_kinds)

        def rotary(positions_bs: jax.Array) -> dict[float, tuple[jax.Array, jax.Array]]:
            dtype = accumulation_dtype(self.dtype)
            return {base: rotary_table(positions_bs, config.rotary_size, base, dtype) for base in bases}

        if cache is None:
            positions_bs = segment_positions(segments_bs) if positions_bs is None else positions_bs
            return Context(segments_bs, ops.key_segments(segments_bs), rotary(positions_bs)), None
        slot_bs = new_slots(segments_bs, cache.length_b)
        seen_bt = write_slots(cache.segments_bt, segments_bs, slot_bs)
        if positions_bs is None:
            positions_bs = jnp.take_along_axis(segment_positions(seen_bt), slot_bs, axis=1, mode="clip")
        context = Context(segments_bs, seen_bt, rotary(positions_bs), cache.length_b)
        return context, Cache(cache.layers, seen_bt, cache.length_b + count_kept(segments_bs))

    @staticmethod
    def hf_tensors(config: ModelConfig) -> Iterator[HfTensor]:
        """Yield the tensors in a `transformers` folder that belong to no layer."""
        d = config.hidden_size
        yield same("model.embed_tokens.weight", "embedding", config.vocab_size, d)
        yield same("model.input_hidden_states_scale", "input_scale", d)
        yield same("model.input_hidden_states_bias", "input_bias", d)
        yield same("model.norm.weight", "norm.weight", d)
        if config.head_bias:
            yield same("lm_head.bias", "head_bias", config.vocab_size)


Carry = tuple[jax.Array, jax.Array]  # residual stream and the router's state


def _scan(
    blocks: Any, norm: RMSNorm, start: Carry, dtype: Any, context: Context, ops: Ops, remat: Remat
) -> tuple[jax.Array, jax.Array, Carrier]:
    """Run the stacked layers, which `norm` follows; `dtype` is that of activations.

    Returns the residual stream, the tokens per expert, [groups, layers of one, e + 1], and the carrier for `norm`.
    """
    packed, unpack = zip(*map(pack_small, blocks), strict=True)
    ops = dataclasses.replace(ops, router_step=None)  # which has no gradient

    def apply(unpack: Callable[[Any], Block], packed: Any, x: Any, state: Any, *norms: Any) -> LayerOutput:
        return ops.gather_layer(unpack(packed))(x, state, context, None, ops, *norms)

    layers = [functools.partial(apply, function) for function in unpack]
    if remat != "none":  # unpacked again in the backward pass, so that only the scanned arrays are kept
        layers = [jax.checkpoint(layer, policy=POLICIES[remat], prevent_cse=False) for layer in layers]

    def group(carry: tuple[Any, ...], scanned: tuple) -> tuple[tuple[Any, ...], jax.Array]:
        (x, state, carrier), counts = carry, []
        for layer, parameters, following_d in zip(layers, *scanned, strict=True):
            x, state, count, _, carrier = layer(parameters, x, state, carrier, following_d)
            counts.append(count)
        return (x, state, carrier), jnp.stack(counts)

    first_gd, *others_gd = (block.attention_norm.weight[...] for block in blocks)
    following_gd = *others_gd, jnp.concatenate([first_gd[1:], norm.weight[...][None]])
    with part("norm"):
        carrier = Carrier(rms_norm(start[0], first_gd[0], norm.eps, dtype))
    (x_bsd, _, carrier), counts = ops.scan_layers(group, (*start, carrier), (packed, following_gd))
    return x_bsd, counts, carrier


def _decode(
    blocks: list[Block], norm: RMSNorm, start: Carry, dtype: Any, context: Context, ops: Ops, cache: Cache
) -> tuple[jax.Array, jax.Array, Cache]:
    """Run the layers one after another, since a scan would copy each layer's parameters and cache at each step.

    Returns the result of `norm`, the tokens per expert, [l, e + 1], and the new cache.
    """
    (x_bsd, state_bsr), counts, layers = start, [], []
    with part("norm"):
        carrier = Carrier(blocks[0].attention_norm(x_bsd, dtype))
    following = *(block.attention_norm for block in blocks[1:]), norm
    for block, before, after in zip(blocks, cache.layers, following, strict=True):
        layer, weight_d = ops.gather_layer(block), after.weight[...]
        x_bsd, state_bsr, count, kept, carrier = layer(x_bsd, state_bsr, context, before, ops, carrier, weight_d)
        counts.append(count)
        layers.append(kept)
    return carrier.value, jnp.stack(counts), dataclasses.replace(cache, layers=tuple(layers))


def abstract_model(config: ModelConfig) -> Zaya:
    """Make a model with shapes and dtypes instead of values."""
    return _abstract_model(config, jnp.result_type(float) == jnp.float64)


@functools.lru_cache(maxsize=8)
def _abstract_model(config: ModelConfig, x64: bool) -> Zaya:  # whose dtypes depend on `x64`
    del x64
    return jax.eval_shape(functools.partial(Zaya, config), jax.random.key(0))


def init_cache(config: ModelConfig, batch: int, capacity: int, dtype: DTypeLike = jnp.float32) -> Cache:
    """Make an empty cache for `capacity` tokens in each of `batch` rows, with keys and values in `dtype`."""
    kinds = config.layer_kinds * config.num_groups
    layers = tuple(ATTENTION[kind.attention].init_cache(config, kind, batch, capacity, dtype) for kind in kinds)
    return Cache(layers, jnp.zeros((batch, capacity), jnp.int32), jnp.zeros(batch, jnp.int32))


def layer_blocks(model: Zaya) -> list[Block]:
    """Return the blocks of all layers in their order."""
    groups = jax.tree.leaves(model.blocks)[0].shape[0]
    return [jax.tree.map(lambda x, group=group: x[group], block) for group in range(groups) for block in model.blocks]


def unrolled(model: Zaya) -> Zaya:
    """Return the model with a stack of one layer for each layer, as a copy unless it is so already.

    Decoding uses each layer's parameters where they are. With stacks, every call would copy the layers first, and every
    step the attention's projections side by side, which are one parameter here.
    """
    return model if len(model.blocks) == model.config.num_layers else _unrolled(model)


@jax.jit
def _unrolled(model: Zaya) -> Zaya:
    model = jax.tree.map(lambda x: x, model)  # another module with the same arrays
    model.blocks = nnx.List([jax.tree.map(lambda x: x[None], block) for block in layer_blocks(model)])
    for block in model.blocks:
        block.attention.join_projections()
    return model


def logits(model: Zaya, tokens_bs: jax.Array, segment_ids: Maybe = None, positions: Maybe = None) -> jax.Array:
    """Compute fp32 logits [b, s, v] of the next token; see `Zaya.__call__` for the arguments.

    They take 4·b·s·v bytes; for training use `model.loss.chunked_loss`, which does not store them.
    """
    return head(model, model(tokens_bs, segment_ids, positions).hidden_bsd)


def head(model: Zaya, hidden_bsd: jax.Array) -> jax.Array:
    """Apply the tied head to `hidden_bsd`; returns fp32 logits."""
    with part("loss"):
        head_vd = model.embedding[...].astype(hidden_bsd.dtype)
        few = math.prod(hidden_bsd.shape[:-1]) <= _FEW_ROWS
        out = (_few_rows_head if few else _head_product)(hidden_bsd, head_vd)
    return out + model.head_bias[...].astype(out.dtype) if model.config.head_bias else out


_FEW_ROWS = 16


def _head_product(hidden_bsd: jax.Array, head_vd: jax.Array) -> jax.Array:
    sums = accumulation_dtype(hidden_bsd.dtype)
    return jnp.einsum("...d,vd->...v", hidden_bsd, head_vd, preferred_element_type=sums)


def _few_rows_head(hidden_bsd: jax.Array, head_vd: jax.Array) -> jax.Array:
    """Multiply a few rows without a copy of the head, which XLA:CPU would transpose, and XLA:GPU cast for one row."""
    rows = hidden_bsd.reshape(-1, hidden_bsd.shape[-1])

    def on_cpu(rows_td: jax.Array, head_vd: jax.Array) -> jax.Array:
        return jax.lax.optimization_barrier(_head_product(head_vd, rows_td)).T

    def on_gpu(rows_td: jax.Array, head_vd: jax.Array) -> jax.Array:
        return _head_product(jnp.pad(rows_td, ((0, -len(rows_td) % 8), (0, 0))), head_vd)[: len(rows_td)]

    out_tv = jax.lax.platform_dependent(rows, head_vd, cpu=on_cpu, default=on_gpu)
    return out_tv.reshape(*hidden_bsd.shape[:-1], -1)
