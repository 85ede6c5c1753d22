"""A model's parameters as flat dicts by name, the form that all code outside of the model uses."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zaya_jax.config import ModelConfig
from zaya_jax.model.layers import BalancingBias, Role, Roles
from zaya_jax.model.zaya import Zaya, abstract_model
from zaya_jax.ops.precision import accumulation_dtype

Arrays = dict[str, jax.Array]
_LOW_PRECISION: tuple[Role, ...] = ("attention", "router", "expert", "embedding", "convolution")


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def is_stacked(name: str) -> bool:
    """True if a parameter belongs to the layers, so that its first axis is the scan over layers."""
    return name.startswith("blocks.")


def layer_position(name: str) -> int:
    """Return the position in the period of the layer pattern of a parameter that `is_stacked`."""
    return int(name.split(".")[1])


def name_in_layer(name: str) -> str:
    """Return the name within its layer of a parameter that `is_stacked`."""
    return name.split(".", 2)[2]


def is_balancing_bias(name: str) -> bool:
    """True if `name` is the name of a balancing bias."""
    return name.rpartition(".")[2] == "balancing_bias"


def _variables(model: Zaya, kind: type[nnx.Variable]) -> dict[str, nnx.Variable]:
    flat = jax.tree.leaves_with_path(model, is_leaf=_is_variable)
    return {_name(path): variable for path, variable in flat if isinstance(variable, kind)}


def parameters(model: Zaya) -> Arrays:
    """Return the trained parameters by name, such as 'blocks.0.attention.query' (0 is the position in the period)."""
    return {name: variable[...] for name, variable in _variables(model, nnx.Param).items()}


def shapes(model: Zaya) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter, by name; `model` may be abstract."""
    return {name: variable.get_value().shape for name, variable in _variables(model, nnx.Param).items()}


def balancing_biases(model: Zaya) -> Arrays:
    """Return the balancing biases, by name."""
    return {name: variable[...] for name, variable in _variables(model, BalancingBias).items()}


def abstract_weights(config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape and dtype of each parameter and balancing bias, by name."""
    model = abstract_model(config)
    variables = {**_variables(model, nnx.Param), **_variables(model, BalancingBias)}
    return {name: variable.get_value() for name, variable in variables.items()}


def roles(model: Zaya) -> dict[str, Role]:
    """Return the role of each parameter, by name; ValueError if one was not made with `layers.param`."""
    metadata = {name: variable.get_metadata() for name, variable in _variables(model, nnx.Param).items()}
    if without_role := [name for name, facts in metadata.items() if "role" not in facts]:
        raise ValueError(f"These parameters have no role: {', '.join(without_role)}.")
    return {name: facts["role"] for name, facts in metadata.items()}


def fused(model: Zaya) -> dict[str, int]:
    """Return the number of matrices side by side in each parameter that holds more than one, by name."""
    parts = {name: variable.get_metadata()["parts"] for name, variable in _variables(model, nnx.Param).items()}
    return {name: count for name, count in parts.items() if count > 1}


def with_values(model: Zaya, values: Mapping[str, Any]) -> Zaya:
    """Return `model`, which may be abstract, with `values` by name for all of its variables."""
    return map_variables(model, lambda name, _: values[name])


def map_variables(module: Any, function: Callable[[str, Any], Any]) -> Any:
    """Replace each variable's value, an array or `lora.Adapted`, by `function(name in the module, value)`."""
    flat, tree = jax.tree.flatten_with_path(module, is_leaf=_is_variable)
    return tree.unflatten(variable.replace(function(_name(path), variable.get_value())) for path, variable in flat)


def compute_dtypes(roles: Roles, dtype: jax.typing.DTypeLike) -> dict[str, jnp.dtype]:
    """Return the compute dtype of each parameter: `dtype` for matrices, embedding and convolutions, else fp32.

    Vectors in fp32 cost nothing, and the residual stream they act on is fp32. (With `dtype` float64, all are float64.)
    """
    low, exact = jnp.dtype(dtype), accumulation_dtype(dtype)
    return {name: low if role in _LOW_PRECISION else exact for name, role in roles.items()}
