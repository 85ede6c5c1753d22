"""A model's parameters as flat dicts by name, which is the form everything outside the model works on."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zaya_jax.model.layers import BalancingBias, Role
from zaya_jax.model.zaya import Zaya
from zaya_jax.ops.precision import accumulation_dtype

Arrays = dict[str, jax.Array]
_LOW_PRECISION: tuple[Role, ...] = ("attention", "router", "expert", "embedding", "convolution")


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path)


def _variables(model: Zaya) -> dict[str, nnx.Variable]:
    flat, _ = jax.tree_util.tree_flatten_with_path(model, is_leaf=_is_variable)
    return {_name(path): variable for path, variable in flat}


def parameters(model: Zaya) -> Arrays:
    """What the loss trains, by names such as 'blocks.0.attention.query' (0 the position in the period)."""
    return {name: v[...] for name, v in _variables(model).items() if isinstance(v, nnx.Param)}


def shapes(model: Zaya) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter, by name; `model` may be abstract."""
    return {name: v.get_value().shape for name, v in _variables(model).items() if isinstance(v, nnx.Param)}


def balancing_biases(model: Zaya) -> Arrays:
    """What the load moves, by name."""
    return {name: v[...] for name, v in _variables(model).items() if isinstance(v, BalancingBias)}


def roles(model: Zaya) -> dict[str, Role]:
    """Role of each parameter, by name; ValueError for one that was made without (`layers.param`)."""
    metadata = _metadata(model)
    if bare := [name for name, each in metadata.items() if "role" not in each]:
        raise ValueError(f"These parameters have no role: {', '.join(bare)}.")
    return {name: each["role"] for name, each in metadata.items()}


def fused(model: Zaya) -> dict[str, int]:
    """Number of matrices side by side in a parameter, by name, for those that hold more than one."""
    return {name: each["parts"] for name, each in _metadata(model).items() if each["parts"] > 1}


def _metadata(model: Zaya) -> dict[str, dict[str, Any]]:
    return {name: v.get_metadata() for name, v in _variables(model).items() if isinstance(v, nnx.Param)}


def with_values(model: Zaya, values: Mapping[str, Any]) -> Zaya:
    """A model like `model` (which may be abstract) holding `values`, one for each of its variables."""

    def fill(path: tuple[Any, ...], variable: nnx.Variable) -> nnx.Variable:
        return variable.replace(values[_name(path)])

    return jax.tree_util.tree_map_with_path(fill, model, is_leaf=_is_variable)


def map_variables(module: Any, function: Callable[[str, Any], jax.Array]) -> Any:
    """`module` with `function` of each variable's name within it and value, an array or `lora.Adapted`."""

    def replace_value(path: tuple[Any, ...], variable: nnx.Variable) -> nnx.Variable:
        return variable.replace(function(_name(path), variable.get_value()))

    return jax.tree_util.tree_map_with_path(replace_value, module, is_leaf=_is_variable)


def compute_dtypes(roles: Mapping[str, Role], dtype: jax.typing.DTypeLike) -> dict[str, jnp.dtype]:
    """The dtype each parameter computes in: matrices, embedding and convolutions in `dtype`, vectors in that of sums.

    Vectors cost nothing in fp32, and the stream they act on is fp32.
    """
    return {
        name: jnp.dtype(dtype) if role in _LOW_PRECISION else accumulation_dtype(dtype) for name, role in roles.items()
    }
