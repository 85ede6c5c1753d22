"""Capture intermediate values of a model by name, without editing the model.

Modules are called through proxies that run the module's own methods and record the arguments and results of each call.
A value inside the scan over layers leaves it as an additional output of the scan (`Ops.scan_layers`), so nothing has
side effects: `jax.jit` and `jax.grad` work as for the model, and compile time does not grow with depth.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from zaya_jax.errors import InputError
from zaya_jax.model.zaya import Maybe, Zaya
from zaya_jax.ops import LOCAL, Ops
from zaya_jax.ops.parts import LAYERS

Note = Callable[[str, Any], None]


def capture(
    model: Zaya, tokens_bs: jax.Array, names: str | Sequence[str], segment_ids: Maybe = None, positions: Maybe = None,
    *, ops: Ops = LOCAL,
) -> dict[str, jax.Array]:  # fmt: skip
    """Run the model and return intermediate values.

    Names follow the attributes of the modules, with `layers` for a layer:

    | name | value |
    |---|---|
    | `layers.attention`, `layers.mixture` | result of a module; the first one, or the field `out_bsd`, of several |
    | `layers.attention.1` | second result of a module |
    | `layers.mixture.router.expert_bs`, `layers.mixture.counts_e` | field of a result |
    | `layers.mixture.args.h_bsd` | argument of a module, by the name in its signature |
    | `layers.mixture.router.probabilities`, `layers.attention.attend.args.q_bshc` | the same of other methods |
    | `layers.args.x_bsd`, `layers` | the residual stream before and after each layer |

    `names` may be patterns such as `layers.mixture.*` (`fnmatch`); they are static under `jax.jit`. `capture_shapes`
    lists the names. See `Zaya.__call__` for the other arguments.

    Returns the values by name, in the dtype in which the model computes them; those of layers are stacked, [l, …].
    `InputError`, which lists those there are, if no value has one of the names.
    """
    patterns = (names,) if isinstance(names, str) else tuple(names)
    values = _run(patterns, ops, model, tokens_bs, segment_ids, positions)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in values):
            known = ", ".join(capture_shapes(model, tokens_bs, segment_ids, positions, ops=ops))
            raise InputError(f"The model has no intermediate value {pattern!r}; it has {known}.")
    return values


def capture_shapes(
    model: Zaya, tokens_bs: Any, segment_ids: Maybe = None, positions: Maybe = None, *, ops: Ops = LOCAL
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape and dtype of every value that `capture` can return, by name, without computing anything."""
    return jax.eval_shape(functools.partial(_run, ("*",), ops), model, tokens_bs, segment_ids, positions)


def _run(patterns: tuple[str, ...], ops: Ops, model: Zaya, *inputs: Maybe) -> dict[str, jax.Array]:
    values_by_name: dict[str, jax.Array] = {}
    layers: list[dict[str, jax.Array]] = []  # of the layers that one step of the scan runs

    def gather_layer(block: Any) -> Any:
        layers.append({})
        return _Recorded(ops.gather_layer(block), LAYERS, functools.partial(_note, layers[-1], patterns))

    def scan_layers(step: Callable[..., Any], carry: Any, scanned: Any) -> tuple[Any, Any]:
        def recorded(carry: Any, scanned: Any) -> tuple[Any, Any]:
            layers.clear()
            carry, out = step(carry, scanned)
            return carry, (out, {name: jnp.stack([values[name] for values in layers]) for name in layers[0]})

        carry, (out, values) = ops.scan_layers(recorded, carry, scanned)
        values_by_name.update({name: x.reshape(-1, *x.shape[2:]) for name, x in values.items()})
        return carry, out

    recording = dataclasses.replace(ops, gather_layer=gather_layer, scan_layers=scan_layers)
    _Recorded(model, "", functools.partial(_note, values_by_name, patterns))(*inputs, ops=recording)
    return values_by_name


def _note(values: dict[str, jax.Array], patterns: tuple[str, ...], name: str, value: Any) -> None:
    """Record an array, or the parts of a tuple, if a pattern matches; a second call in a layer is `name#2`."""
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", ("out_bsd", *map(str, range(1, len(value)))))
        for field, part in zip(fields, value, strict=True):
            _note(values, patterns, name if field == "out_bsd" else _join(name, field), part)
    elif isinstance(value, jax.Array) and any(fnmatchcase(name, pattern) for pattern in patterns):
        calls = sum(known.partition("#")[0] == name for known in values)
        values[f"{name}#{calls + 1}" if calls else name] = value


class _Recorded:
    """Stands for a module: its methods see the proxy as `self`, so calls of its submodules are recorded too."""

    def __init__(self, module: nnx.Module, name: str, note: Note) -> None:
        self._module, self._name, self._note = module, name, note

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._call(type(self._module).__call__, self._name, *args, **options)

    def __getattr__(self, attribute: str) -> Any:
        method = inspect.getattr_static(type(self._module), attribute, None)
        name = _join(self._name, attribute)
        if isinstance(method, types.FunctionType) and not attribute.startswith("_"):
            return functools.partial(self._call, method, name)
        value = getattr(self._module, attribute)
        return _Recorded(value, name, self._note) if isinstance(value, nnx.Module) and callable(value) else value

    def _call(self, method: Callable[..., Any], name: str, *args: Any, **options: Any) -> Any:
        for argument, value in inspect.signature(method).bind(self, *args, **options).arguments.items():
            if isinstance(value, jax.Array):
                self._note(_join(name, f"args.{argument}"), value)
        result = method(self, *args, **options)
        self._note(name, result)
        return result


def _join(name: str, part: str) -> str:
    return f"{name}.{part}" if name and part else name or part
