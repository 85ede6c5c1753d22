"""Tiny models for tests: configurations, parameters drawn at random, packed documents, small blocks."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from zaya_jax.config import ModelConfig
from zaya_jax.model import loss, tree
from zaya_jax.model.zaya import Zaya, abstract_model
from zaya_jax.ops import blockwise, grouped_matmul

TINY = ModelConfig(
    vocab_size=37, hidden_size=24, num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=8, num_experts=4,
    expert_size=12, router_size=8, max_positions=64, rope_base=1.0e4,
)  # fmt: skip
# Compiles in half the time; the programs are small enough not to miss what is left out.
jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
)

VARIANTS = {
    "plain": {},
    "biased": {"attention_bias": True, "head_bias": True, "depthwise_kernel": 4, "grouped_kernel": 3,
               "num_kv_heads": 1},
    "sliding": {"layer_pattern": ("full", "sliding"), "num_layers": 4, "sliding_window": 4, "sliding_rope_base": 500.0,
                "depthwise_kernel": 3, "grouped_kernel": 1, "num_query_heads": 3, "num_kv_heads": 3},
    "kernel_one": {"depthwise_kernel": 1, "grouped_kernel": 1, "rotary_fraction": 1.0, "num_experts": 3},
}  # fmt: skip

# Parts of ZAYA1 taken away; `transformers` has no form of them.
ABLATIONS = {
    "gqa": {"attention": "gqa", "attention_bias": True, "layer_pattern": ("full", "sliding"), "num_layers": 4,
            "sliding_window": 4, "sliding_rope_base": 500.0},
    "bare": {"attention": "gqa", "router": "linear", "residual_scaling": False, "num_kv_heads": 1},
    "normed": {"attention": "gqa_qk_norm", "router_layers": 2},
    "reduced": {"convolutions": False, "query_key_mean": False, "value_shift": False, "router_layers": 1,
                "depth_averaging": False},
}  # fmt: skip


def tiny_config(variant: str = "plain", **overrides) -> ModelConfig:
    """One of `VARIANTS` or `ABLATIONS`, with `overrides`."""
    config = dataclasses.replace(TINY, **{**(VARIANTS | ABLATIONS)[variant], **overrides})
    config.check()
    return config


@functools.cache
def random_values(config: ModelConfig, seed: int = 0) -> dict[str, jax.Array]:
    """Values for every variable by name: nothing at its neutral start, skip winning in some layers. Read only."""
    rng = np.random.default_rng(seed)
    model = abstract_model(config)
    roles = tree.roles(model)
    values = {}
    for name, x in jax.eval_shape(tree.parameters, model).items():
        if roles[name] in ("norm", "scale", "temperature"):
            value = rng.uniform(0.5, 1.5, x.shape)
        elif roles[name] == "bias":
            value = rng.normal(0, 0.2, x.shape)
        else:
            value = rng.normal(0, 1.0 if roles[name] == "router" else 0.3, x.shape)
        values[name] = jnp.asarray(value, jnp.float32)
    for name, x in jax.eval_shape(tree.balancing_biases, model).items():
        bias = rng.normal(0, 0.05, x.shape)
        bias[0, -1] = -1.0
        values[name] = jnp.asarray(bias, jnp.float32)
    return values


def random_model(config: ModelConfig, seed: int = 0) -> Zaya:
    """A model with `random_values`."""
    return tree.with_values(abstract_model(config), random_values(config, seed))


@st.composite
def packed_rows(draw, rows: int, length: int, front: bool = True) -> np.ndarray:
    """int32 [rows, length] documents: unique ids in each row, padding 0 behind and, if asked, in front."""
    segments = np.zeros((rows, length), np.int32)
    for row in segments:
        at = draw(st.sampled_from([0, 0, 1, 3])) if front else 0
        lengths = draw(st.lists(st.sampled_from([1, 1, 2, 3, 5, 9]), max_size=8))
        for number, size in enumerate(lengths):
            row[at : at + size] = 2 * number + 1  # any numbers do, they need not follow one another
            at += size
    return segments


def seeds() -> st.SearchStrategy[int]:
    return st.integers(0, 2**31 - 1)


@contextlib.contextmanager
def blocks_of(size: int) -> Iterator[None]:
    """Attention, grouped products and the loss in blocks of `size`, so that small shapes have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "QUERY_BLOCK", size)
        patch.setattr(blockwise, "KEY_BLOCK", size)
        rows = (2 * size, size, max(size // 2, 1))
        patch.setattr(grouped_matmul, "ROW_BLOCKS", {2**31: rows})
        patch.setattr(grouped_matmul, "OUTER_BLOCKS", rows[::2])
        patch.setattr(loss, "chunk_tokens", lambda tokens, *_, **__: min(size, tokens))
        jax.clear_caches()
        yield
    jax.clear_caches()


def folder_blocks(size: int) -> tuple[Callable, Callable]:
    """Two hooks of a conftest, around each test, that give the tests of its folder `blocks_of(size)`.

    Unlike a fixture of scope "package", which without an `__init__.py` lasts as long as the session, they leave the
    tests of other folders the product's blocks.
    """
    stack, inside = contextlib.ExitStack(), False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup() -> None:
        nonlocal inside
        if not inside:
            inside = True
            stack.enter_context(blocks_of(size))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        nonlocal inside
        try:
            return (yield)
        finally:
            if nextitem is None or nextitem.path.parent != item.path.parent:
                inside = False
                stack.close()

    return pytest_runtest_setup, pytest_runtest_teardown


def assert_close(ours, theirs, rtol: float, least: float = 0.0) -> None:
    """Every element within `rtol` of the largest magnitude in its array of `theirs`; pytrees leaf by leaf.

    Where terms cancel, an element's rounding error is of the size of the terms, not of the element. How large it is
    depends on the CPU's instructions, so a tolerance relative to each element passes by luck.

    Args:
      ours: array or pytree.
      theirs: what it should be.
      rtol: of the largest magnitude.
      least: taken for the largest magnitude where that is smaller, since whole arrays may cancel.
    """

    def check(path, x, y):
        scale = max(least, np.abs(y).max(initial=0))
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * scale, err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(check, ours, theirs)


def assert_trees_close(ours, theirs, rtol: float = 1e-4) -> None:
    """Each leaf within `rtol` of the other's norm (or of the largest norm, for leaves near zero)."""
    assert ours.keys() == theirs.keys()
    norms = {name: float(np.linalg.norm(np.asarray(x, np.float64))) for name, x in theirs.items()}
    floor = 1e-3 * max(norms.values())
    for name, x in theirs.items():
        difference = np.linalg.norm(np.asarray(ours[name], np.float64) - np.asarray(x, np.float64))
        assert difference <= rtol * max(norms[name], floor), f"{name}: {difference} of {norms[name]}"
