"""Estimate the launches of a lowered program and the bytes that they read and write, without compiling it.

XLA compiles for a GPU only where there is one, so these rules imitate its fusion, under favourable assumptions:

* A matmul, a sort, a scatter, a kernel and any other custom call is one launch each.
* Elementwise operations (including slice, pad, concatenate, gather and transpose) are fused with those that they read
  from or that read the same array, unless a launch lies between them. Such a group is one launch if one of its values
  must be in memory: for a matmul, a sort, a kernel, a loop or the caller. Values that only other groups need are
  recomputed there.
* A reduction is fused with the group of its input, and ends it: operations on its result form another group.
* Operations that no output depends on are not counted. Repeated computations are counted each time.
* Constants, reshapes, scalars and transposes before a matmul are free.
* The launches of a loop are those of its body, counted once and separately.

XLA may need more launches, or fewer where it fuses a normalization, a bias after a matmul, or a gather before one. The
same rules apply to programs with and without kernels.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

_PRODUCTS = ("dot_general", "dot", "convolution", "ragged_dot")
_REDUCTIONS = ("reduce", "reduce_window", "scan")  # the last two compute cumulative sums
_FREE = ("constant", "iota", "reshape", "bitcast_convert", "create_token")
_SLICES = ("slice", "dynamic_slice", "gather")


@dataclasses.dataclass
class Launches:
    """The launches of a program or of the body of a loop.

    Attributes:
      kernels: number of launches of each Triton kernel, by name.
      products: number of matmuls.
      others: number of sorts, scatters and custom calls, by operation.
      fusions: number of fused groups of elementwise operations and reductions.
      bytes: bytes that all launches except kernels read and write, without a cache.
      loops: one iteration of each loop.
    """

    kernels: Counter[str] = dataclasses.field(default_factory=Counter)
    products: int = 0
    others: Counter[str] = dataclasses.field(default_factory=Counter)
    fusions: int = 0
    bytes: int = 0
    loops: list["Launches"] = dataclasses.field(default_factory=list)

    @property
    def total(self) -> int:
        """Number of launches outside of loops."""
        return self.kernels.total() + self.products + self.others.total() + self.fusions

    @property
    def in_loops(self) -> list[int]:
        """Number of launches in one iteration of each loop; nested loops follow the loop that contains them."""
        return [count for loop in self.loops for count in (loop.total, *loop.in_loops)]


def count_launches(lowered: Any) -> Launches:
    """Count the launches of a `jax.stages.Lowered` program, by the rules in the docstring of this module."""
    functions = {}
    for operation in lowered.compiler_ir().body.operations:
        functions[operation.attributes["sym_name"].value] = operation.regions[0].blocks[0]
    return _Body(functions, {}).count(functions["main"])


@dataclasses.dataclass(eq=False)
class _Value:
    """A value of the program.

    Attributes:
      bytes: size in memory.
      stage: length of the longest chain of launches that it depends on.
      inputs: operands of an elementwise operation or a reduction; None for other values.
      maker: the launch, or the reduction, whose result it is.
      free: whether it is a constant or a scalar.
      sliced: whether it is a slice, which reads only as many bytes of its input as it returns.
      turned: the value that it is a transpose of.
      reduced: whether it is a reduction.
      live: whether an output of the program depends on it.
      wanted: whether it must be in memory.
      group: parent in the union-find forest of groups; None for a root.
    """

    bytes: int
    stage: int = 0
    inputs: "list[_Value] | None" = None
    maker: "_Value | _Launch | None" = None
    free: bool = False
    sliced: bool = False
    turned: "_Value | None" = None
    reduced: bool = False
    live: bool = False
    wanted: bool = False
    group: "_Value | None" = None

    def root(self) -> "_Value":
        """Return the root of its group."""
        return self if self.group is None else self.group.root()

    def join(self, other: "_Value") -> None:
        """Merge its group with that of `other`."""
        if self.root() is not other.root():
            self.root().group = other.root()


@dataclasses.dataclass(eq=False)
class _Launch:
    """A launch that is not a fused group.

    Attributes:
      kind: 'product' (a matmul), 'kernel', 'loop' or 'other'.
      name: name of the operation or of the kernel.
      inputs: values that it reads.
      bytes: bytes that it writes.
      body: launches of the body of a loop.
      live: whether an output of the program depends on it.
    """

    kind: str
    name: str
    inputs: list[_Value]
    bytes: int
    body: Launches | None = None
    live: bool = False


class _Body:
    """Collects the values and launches of a function or of the body of a loop."""

    def __init__(self, functions: Mapping[str, Any], outside: Mapping[Any, _Value]) -> None:
        self.functions, self.outside = functions, outside
        self.made: list[_Value] = []
        self.launches: list[_Launch] = []

    def count(self, block: Any) -> Launches:
        """Count the launches of `block` that its outputs depend on; its arguments are in memory."""
        values = {argument: _Value(_bytes(argument.type)) for argument in block.arguments}
        outputs = self.run(block, values)
        _keep(outputs)
        for value in outputs:
            value.wanted = True
        total = Launches()
        for launch in self.launches:
            if launch.live:
                _count(launch, total)
        made = [value for value in self.made if value.live]
        readers: dict[tuple[_Value, int], _Value] = {}
        for value in made:
            for source in value.inputs or ():
                if source.inputs is None and not source.free:
                    readers.setdefault((source, value.stage), value).join(value)
                elif source.stage == value.stage and not source.free:
                    source.join(value)
        groups: dict[_Value, list[_Value]] = {}
        for value in made:
            groups.setdefault(value.root(), []).append(value)
        for group in groups.values():
            if written := [value for value in group if value.wanted or value.reduced]:
                total.fusions += 1
                total.bytes += sum(value.bytes for value in written) + _read(set(group), written)
        return total

    def run(self, block: Any, values: dict[Any, _Value]) -> list[_Value]:
        """Process the operations of a block, and return its outputs."""
        for operation in block.operations:
            inputs = [values[x] if x in values else self.captured(x) for x in operation.operands]
            name = operation.operation.name.partition(".")[2]
            if name == "return":
                return inputs
            values.update(zip(operation.results, self.apply(name, operation, inputs, values), strict=True))
        return []

    def captured(self, operand: Any) -> _Value:
        """Return the value of an operand from outside of a loop, which must be in memory."""
        value = self.outside[operand]
        _keep([value])
        value.wanted = True
        return _Value(value.bytes, free=value.free)

    def apply(self, name: str, operation: Any, inputs: list[_Value], values: dict[Any, _Value]) -> list[_Value]:
        """Return the results of one operation."""
        results = [_bytes(result.type) for result in operation.results]
        stage = max((value.stage for value in inputs), default=0)
        if name == "call":
            block = self.functions[operation.attributes["callee"].value]
            return self.run(block, dict(zip(block.arguments, inputs, strict=True)))
        if name == "optimization_barrier":
            return inputs
        if name == "while":
            body = _Body(self.functions, values).count(operation.regions[1].blocks[0])
            return self.launch(_Launch("loop", name, inputs, 0, body), results, stage)
        if len(operation.regions) and name not in (*_REDUCTIONS, "sort", "scatter"):
            raise ValueError(f"The launches of {operation.operation.name} cannot be counted.")
        if name == "reshape" or (name == "broadcast_in_dim" and results[0] == inputs[0].bytes):
            return inputs
        if name in _PRODUCTS:
            inputs = [value if value.turned is None else value.turned for value in inputs]
            return self.launch(_Launch("product", name, inputs, sum(results)), results, stage)
        if name in _FREE or (inputs and all(value.free for value in inputs)):
            return [_Value(size, free=True) for size in results]
        if name in _REDUCTIONS:
            return self.reduction(operation, [value for value in inputs if not value.free], results, stage)
        if name == "custom_call" and "triton" in str(operation.attributes["call_target_name"]):
            return self.launch(_Launch("kernel", _kernel_name(operation), inputs, sum(results)), results, stage)
        if name in ("sort", "custom_call", "scatter"):
            called = operation.attributes["call_target_name"].value if name == "custom_call" else name
            return self.launch(_Launch("other", called, inputs, sum(results)), results, stage)
        made = _Value(results[0], stage, inputs, free=_single(operation), sliced=name in _SLICES)
        made.turned = inputs[0] if name == "transpose" else None
        if not made.free:
            self.made.append(made)
        return [made]

    def launch(self, launch: _Launch, results: list[int], stage: int) -> list[_Value]:
        """Add a launch, and return its results, which are in memory."""
        self.launches.append(launch)
        return [_Value(size, stage + 1, maker=launch) for size in results]

    def reduction(self, operation: Any, inputs: list[_Value], results: list[int], stage: int) -> list[_Value]:
        """Add a reduction to the group of its inputs, and return its results, which are in memory for later groups."""
        made = [_Value(size, stage, inputs, reduced=True) for size in results]
        for result in made[1:]:
            result.join(made[0])
        self.made += made
        return [_Value(result.bytes, stage + 1, maker=result, free=_single(operation)) for result in made]


def _keep(values: list[_Value]) -> None:
    """Mark everything that `values` depend on as live, and the inputs of launches among it as wanted."""
    rest: list[_Value | _Launch] = list(values)
    while rest:
        node = rest.pop()
        if node.live:
            continue
        node.live = True
        if isinstance(node, _Value) and node.maker is not None:
            rest.append(node.maker)
        if isinstance(node, _Launch) and node.name != "scatter":
            for value in node.inputs:
                value.wanted = True
        rest += node.inputs or []


def _count(launch: _Launch, total: Launches) -> None:
    match launch.kind:
        case "product":
            total.products += 1
        case "kernel":
            total.kernels[launch.name] += 1
        case "loop" if launch.body:
            total.loops.append(launch.body)
        case _:
            total.others[launch.name] += 1
    if launch.kind in ("product", "other"):
        total.bytes += launch.bytes + sum(value.bytes for value in set(launch.inputs))


def _read(inside: set[_Value], written: list[_Value]) -> int:
    """Return the bytes that a group reads: each value in memory once; other values are recomputed."""
    sizes: dict[_Value, int] = {}
    rest, seen = list(written), set(written)
    while rest:
        value = rest.pop()
        for source in value.inputs or ():
            if source.inputs is None or (source.wanted and source not in inside):
                size = min(value.bytes, source.bytes) if value.sliced else source.bytes
                sizes[source] = 0 if source.free else max(sizes.get(source, 0), size)
            elif source not in seen:
                seen.add(source)
                rest.append(source)
    return sum(sizes.values())


def _kernel_name(operation: Any) -> str:
    attributes = operation.attributes
    return attributes["mhlo.backend_config" if "mhlo.backend_config" in attributes else "backend_config"]["name"].value


def _single(operation: Any) -> bool:
    return all(not result.type.shape for result in operation.results)


def _bytes(kind: Any) -> int:
    """Return the bytes of a tensor; 1-bit elements take a byte each."""
    digits = re.search(r"\d+", str(kind.element_type))
    return math.prod(kind.shape) * max(int(digits.group()) if digits else 0, 8) // 8
