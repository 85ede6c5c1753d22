"""Count the bytes that kernels move, by simulating the loads and stores of their programs one after another.

The addresses of loads and stores depend only on integers: program ids, loop counters and integer arrays. The simulation
computes integers as the device would, but represents floats by shapes without values. A laptop can therefore simulate
a kernel of the 8B's size.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

LINE = 128  # bytes of a cache line
CACHE = 32 * 2**20  # bytes; smaller than the last-level cache of each GPU (H200 50 MiB, MI300X 256 MiB)


class Traffic(NamedTuple):
    """Bytes that one launch moves.

    Attributes:
      name: name of the kernel.
      programs: number of programs in its grid.
      requested: bytes of all loads and stores, including those that hit the cache.
      moved: bytes moved between memory and a cache of `CACHE` bytes that is flushed when it is full. If programs run in
        order, an LRU cache of that size moves no more (flush-when-full and LRU: Sleator and Tarjan 1985).
      least: minimum bytes: each array is read or written once.
    """

    name: str
    programs: int
    requested: int
    moved: int
    least: int


class Unknown(NamedTuple):
    """An array without values."""

    shape: tuple[int, ...]
    dtype: Any


def kernel_bytes(function: Callable[..., Any], *arguments: Any) -> list[Traffic]:
    """Return the traffic of each kernel that `function` launches, in order.

    Args:
      function: function of arrays.
      arguments: its arguments: pytrees of `jax.ShapeDtypeStruct`s, and of arrays for integers that determine addresses.

    Raises:
      ValueError: a kernel's addresses, loops or branches depend on unknown values, or it accesses memory outside of an
        array.
    """
    leaves, tree = jax.tree.flatten(arguments)
    closed = jax.make_jaxpr(lambda *flat: function(*jax.tree.unflatten(tree, flat)))(*leaves)
    walk = _Walk()
    walk.run(closed.jaxpr, closed.consts, [_value(leaf) for leaf in leaves])
    return walk.traffic


def _value(leaf: Any) -> Any:
    return _unknown(leaf) if isinstance(leaf, jax.ShapeDtypeStruct) or _is_float(leaf) else np.asarray(leaf)


def _known(values: Sequence[Any]) -> bool:
    return not any(isinstance(value, Unknown | _Array) for value in values)


class _Array:
    """An array argument of a kernel, and which of its cache lines are in the cache."""

    def __init__(self, value: Any, counter: "_Counter") -> None:
        self.value, self.counter = value, counter
        self.itemsize = np.dtype(value.dtype).itemsize
        self.present = np.zeros(math.prod(value.shape) * self.itemsize // LINE + 1, bool)

    def touch(self, indices: Sequence[Any], mask: Any) -> Any:
        """Load or store the elements at `indices` where `mask` is true, and return their values if they are known."""
        if not _known([*indices, *([] if mask is None else [mask])]):
            raise ValueError("A kernel's addresses depend on values that are not known.")
        flat = np.zeros((), np.int64)
        for index, size in zip(indices, self.value.shape, strict=True):
            flat = flat * size + np.asarray(index, np.int64)
        chosen = flat.ravel() if mask is None else np.broadcast_to(flat, mask.shape)[mask]
        self.counter.requested += chosen.size * self.itemsize
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < math.prod(self.value.shape):
            raise ValueError(f"A kernel reaches beyond an array of shape {self.value.shape}.")
        lines = chosen * self.itemsize // LINE
        new = np.unique(lines[~self.present[lines]])
        self.present[new] = True
        self.counter.add(new.size * LINE)
        if isinstance(self.value, Unknown):
            return Unknown(flat.shape if mask is None else mask.shape, self.value.dtype)
        values = self.value.reshape(-1)[np.clip(flat, 0, self.value.size - 1)]
        return values if mask is None else np.where(mask, values, 0).astype(values.dtype)


class _Counter:
    """Counts the traffic of a launch through a cache that is flushed when it is full."""

    def __init__(self) -> None:
        self.arrays: list[_Array] = []
        self.requested = self.moved = self.held = 0

    def add(self, size: int) -> None:
        self.moved += size
        self.held += size
        if self.held > CACHE:
            self.held = 0
            for array in self.arrays:
                array.present[:] = False


class _Walk:
    """Evaluates a function and the kernels that it launches."""

    def __init__(self) -> None:
        self.traffic: list[Traffic] = []
        self.grid: tuple[int, ...] = ()
        self.place: tuple[int, ...] = ()
        self.plans: dict[Jaxpr, list[tuple[Any, Any]]] = {}

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        """Return the outputs of `jaxpr`."""
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, (_constant(c) for c in consts), strict=True))
        values.update(zip(jaxpr.invars, arguments, strict=True))

        def read(atom: Any) -> Any:
            return np.asarray(atom.val) if isinstance(atom, Literal) else values[atom]

        for equation, names in self.plan(jaxpr):
            if equation is None:
                values.update(names)
            else:
                results = self.apply(equation, names, [read(atom) for atom in equation.invars])
                values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def plan(self, jaxpr: Jaxpr) -> list[tuple[Any, Any]]:
        """Return (operation, name) pairs; a run of operations with only float outputs becomes (None, those outputs)."""
        if jaxpr in self.plans:
            return self.plans[jaxpr]
        plan: list[tuple[Any, Any]] = []
        for equation in jaxpr.eqns:
            name, outs = equation.primitive.name, equation.outvars
            if name in _SPECIAL or name in _CALLS or not all(_is_float(out.aval) for out in outs):
                plan.append((equation, name))
                continue
            if any(isinstance(param, ClosedJaxpr | Jaxpr) and _launches(param) for param in equation.params.values()):
                raise ValueError(f"The launches inside {name} cannot be counted.")
            if not plan or plan[-1][0] is not None:
                plan.append((None, {}))
            plan[-1][1].update({out: _unknown(out.aval) for out in outs})
        self.plans[jaxpr] = plan
        return plan

    def apply(self, equation: Any, name: str, inputs: list[Any]) -> list[Any]:
        """Return the outputs of one operation."""
        params = equation.params
        if special := _SPECIAL.get(name):
            return special(self, equation, inputs)
        if name in ("program_id", "num_programs"):
            return [np.int32((self.place if name == "program_id" else self.grid)[params["axis"]])]
        if name in _CALLS:
            inner = params[_CALLS[name]]
            closed = inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())
            return self.run(closed.jaxpr, closed.consts, inputs)
        if not _known(inputs):
            return [_unknown(out.aval) for out in equation.outvars]
        if quick := _QUICK.get(name):
            return [np.asarray(quick(equation, *inputs)).astype(equation.outvars[0].aval.dtype, copy=False)]
        outputs = equation.primitive.bind(*inputs, **params)
        return [np.asarray(output) for output in (outputs if equation.primitive.multiple_results else [outputs])]

    def launch(self, equation: Any, inputs: list[Any]) -> list[Any]:
        """Simulate every program of a kernel."""
        params, counter = equation.params, _Counter()
        outs = [_unknown(out.aval) for out in equation.outvars]
        counter.arrays = [_Array(value, counter) for value in (*inputs, *outs)]
        self.grid = tuple(params["grid_mapping"].grid)
        for number in range(math.prod(self.grid)):
            # The first axis varies fastest.
            self.place = tuple(int(i) for i in np.unravel_index(number, self.grid[::-1]))[::-1]
            self.run(params["jaxpr"], (), counter.arrays)
        least = sum(math.prod(array.value.shape) * array.itemsize for array in counter.arrays)
        name = str(params["name"] or params["jaxpr"].debug_info.func_name)
        self.traffic.append(Traffic(name, math.prod(self.grid), counter.requested, counter.moved, least))
        return outs

    def repeat(self, equation: Any, inputs: list[Any]) -> list[Any]:
        """Evaluate a `scan`. Inputs and outputs that it slices have one axis more than in its body."""
        closed, length = equation.params["jaxpr"], equation.params["length"]
        count = sum(
            _same_shape(inner, outer) for inner, outer in zip(closed.jaxpr.outvars, equation.outvars, strict=True)
        )
        sliced = sum(not _same_shape(inner, value) for inner, value in zip(closed.jaxpr.invars, inputs, strict=True))
        first = len(inputs) - sliced - count
        consts, carry, stacked = inputs[:first], inputs[first : first + count], inputs[first + count :]
        for number in range(length):
            slices = [Unknown(x.shape[1:], x.dtype) if isinstance(x, Unknown) else x[number] for x in stacked]
            carry = self.run(closed.jaxpr, closed.consts, [*consts, *carry, *slices])[:count]
        return [*carry, *(_unknown(out.aval) for out in equation.outvars[count:])]

    def loop(self, equation: Any, inputs: list[Any]) -> list[Any]:
        """Evaluate a `while` loop."""
        params = equation.params
        first, second = params["cond_nconsts"], params["body_nconsts"]
        test, body, carry = inputs[:first], inputs[first : first + second], inputs[first + second :]
        while True:
            (more,) = self.run(params["cond_jaxpr"].jaxpr, params["cond_jaxpr"].consts, [*test, *carry])
            if not _known([more]):
                raise ValueError("A loop's end depends on values that are not known.")
            if not more:
                return carry
            carry = self.run(params["body_jaxpr"].jaxpr, params["body_jaxpr"].consts, [*body, *carry])

    def branch(self, equation: Any, inputs: list[Any]) -> list[Any]:
        """Evaluate the selected branch of a `cond`."""
        which, *operands = inputs
        if not _known([which]):
            raise ValueError("Which branch is taken depends on values that are not known.")
        branches = equation.params["branches"]
        closed = branches[min(max(int(which), 0), len(branches) - 1)]
        return self.run(closed.jaxpr, closed.consts, operands)

    def load(self, equation: Any, inputs: list[Any]) -> list[Any]:
        """Simulate a load or a store; the result of a store, the old value, is not used."""
        params, stored = equation.params, equation.primitive.name in ("swap", "masked_swap")
        if "args_tree" in params:
            array, transforms, *others = jax.tree.unflatten(params["args_tree"], inputs)
            mask = others[1 if stored else 0]
        else:  # a reference that is indexed like an array
            array, *rest = inputs
            transforms, mask = jax.tree.unflatten(params["tree"], rest[1:] if stored else rest), None
        (indexer,) = transforms or (None,)
        indices, shape = _indices(indexer, array.value.shape)
        mask = None if mask is None else np.broadcast_to(mask, np.broadcast_shapes(np.shape(mask), shape))
        values = array.touch(indices, mask)
        return [values for _ in equation.outvars]


# Operations that call another function → the parameter that contains it.
_CALLS = {"jit": "jaxpr", "remat2": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
_SPECIAL: dict[str, Callable[[_Walk, Any, list[Any]], list[Any]]] = {
    "pallas_call": _Walk.launch,
    "scan": _Walk.repeat,
    "while": _Walk.loop,
    "cond": _Walk.branch,
    "get": _Walk.load,
    "swap": _Walk.load,
    "masked_load": _Walk.load,
    "masked_swap": _Walk.load,
}


def _indices(indexer: Any, shape: tuple[int, ...]) -> tuple[list[Any], tuple[int, ...]]:
    """Return indices that broadcast against each other, and their common shape, in which sliced axes come last."""
    entries: list[Any] = [slice(0, size) for size in shape] if indexer is None else list(indexer.indices)
    slices = sum(hasattr(entry, "start") for entry in entries)
    indices = []
    for entry in entries:
        if not hasattr(entry, "start"):
            if isinstance(entry, Unknown):
                raise ValueError("A kernel's addresses depend on values that are not known.")
            indices.append(np.reshape(entry, (*np.shape(entry), *(1,) * slices)) if np.ndim(entry) else entry)
            continue
        size = entry.stop if isinstance(entry, slice) else entry.size
        behind = sum(hasattr(other, "start") for other in entries[len(indices) + 1 :])
        indices.append((np.asarray(entry.start) + np.arange(size)).reshape(-1, *(1,) * behind))
    return indices, np.broadcast_shapes(*(np.shape(index) for index in indices))


def _same_shape(variable: Any, other: Any) -> bool:
    shape = other.value.shape if isinstance(other, _Array) else getattr(other, "aval", other).shape
    return variable.aval.shape == shape


def _launches(function: Any) -> bool:
    return "pallas_call" in str(function)


def _constant(value: Any) -> Any:
    return _unknown(value) if _is_float(value) else np.asarray(value)


def _is_float(array: Any) -> bool:
    return hasattr(array, "dtype") and jnp.issubdtype(array.dtype, jnp.floating)


def _unknown(array: Any) -> Unknown:
    return Unknown(tuple(array.shape), array.dtype)


def _broadcast(equation: Any, x: np.ndarray) -> np.ndarray:
    shape, axes = equation.params["shape"], equation.params["broadcast_dimensions"]
    inner = [1] * len(shape)
    for axis, size in zip(axes, np.shape(x), strict=True):
        inner[axis] = size
    return np.broadcast_to(np.reshape(x, inner), shape)


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *arrays: function(*arrays)


# The most frequent integer operations of kernels, in numpy, because calling jax for each one is slow.
_QUICK: Mapping[str, Callable[..., Any]] = {
    "add": _plain(np.add), "sub": _plain(np.subtract), "mul": _plain(np.multiply), "lt": _plain(np.less),
    "le": _plain(np.less_equal), "gt": _plain(np.greater), "ge": _plain(np.greater_equal), "eq": _plain(np.equal),
    "ne": _plain(np.not_equal), "and": _plain(np.bitwise_and), "or": _plain(np.bitwise_or),
    "not": _plain(np.invert), "min": _plain(np.minimum), "max": _plain(np.maximum),
    "select_n": lambda _, which, no, yes: np.where(which, yes, no),
    "convert_element_type": _plain(np.asarray),
    "broadcast_in_dim": _broadcast,
    "broadcast_to": lambda equation, x: np.broadcast_to(x, equation.params["shape"]),
}  # fmt: skip
