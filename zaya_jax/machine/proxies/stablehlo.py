"""The least number of launches of a lowered program, and the bytes between them, before a compiler has seen it.

XLA's compiler for GPUs runs only where there is one, so the rules here are its own, taken at their best:

* a matrix product, a sort, a scatter and a kernel are a launch each; so is any other custom call;
* elementwise operations (those that slice, pad, join, gather and transpose among them) are fused as far as they touch
  or read the same array, as long as no launch stands between them. A group is a launch where something that it makes
  has to stand in memory: for a product, a sort, a kernel, a loop or the caller. What only other groups want, those
  make again for themselves;
* a reduction is fused with the group that makes what it reduces, and ends it: what follows from it is another group;
* what nothing that the program returns depends on is left out; what is made twice is counted twice;
* constants, reshapes, single numbers and transposes in front of a product cost nothing;
* a loop is the launches of its body, counted once and apart.

The compiler may need more launches than these, and with a fused normalisation, a bias behind a product or a
gather in front of one, fewer; the same rules hold for a program with kernels and for one without.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

_PRODUCTS = ("dot_general", "dot", "convolution", "ragged_dot")
_REDUCTIONS = ("reduce", "reduce_window", "scan")  # the last two are cumulative sums
_FREE = ("constant", "iota", "reshape", "bitcast_convert", "create_token")
_SLICES = ("slice", "dynamic_slice", "gather")


@dataclasses.dataclass
class Launches:
    """What a program, or the body of a loop, launches.

    Attributes:
      kernels: of Triton, by name.
      products: of matrices.
      others: sorts, scatters and custom calls, by operation.
      fusions: of elementwise operations and reductions.
      bytes: that all but the kernels read and write, caches left out.
      loops: the bodies of loops, each once.
    """

    kernels: Counter[str] = dataclasses.field(default_factory=Counter)
    products: int = 0
    others: Counter[str] = dataclasses.field(default_factory=Counter)
    fusions: int = 0
    bytes: int = 0
    loops: list["Launches"] = dataclasses.field(default_factory=list)

    @property
    def total(self) -> int:
        """Outside of loops."""
        return self.kernels.total() + self.products + self.others.total() + self.fusions

    @property
    def in_loops(self) -> list[int]:
        """Of one turn of each loop, those within others after them."""
        return [count for loop in self.loops for count in (loop.total, *loop.in_loops)]


def count_launches(lowered: Any) -> Launches:
    """The launches of a lowered program (`jax.stages.Lowered`), by the rules above."""
    functions = {}
    for operation in lowered.compiler_ir().body.operations:
        functions[operation.attributes["sym_name"].value] = operation.regions[0].blocks[0]
    return _Body(functions, {}).count(functions["main"])


@dataclasses.dataclass(eq=False)
class _Value:
    """A value of the program.

    Attributes:
      bytes: in memory.
      stage: launches that stand one behind another before it is there.
      inputs: what an elementwise value or a reduction is made of; None for any other.
      maker: what it comes out of: a launch, or for what follows from a reduction the reduction.
      free: a constant, or a single number.
      sliced: of its inputs only as much is read as it is large itself.
      turned: what it is a transpose of.
      reduced: it is a reduction.
      live: something that the program returns depends on it.
      wanted: it has to stand in memory.
      group: another value of its group; None where it stands for the group.
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
        """The value that stands for its group."""
        return self if self.group is None else self.group.root()

    def join(self, other: "_Value") -> None:
        """Be of one group with `other`."""
        if self.root() is not other.root():
            self.root().group = other.root()


@dataclasses.dataclass(eq=False)
class _Launch:
    """A launch of its own.

    Attributes:
      kind: 'product', 'kernel', 'loop' or 'other'.
      name: of the operation, or of the kernel.
      inputs: what it reads.
      bytes: that it writes.
      body: of a loop.
      live: something that the program returns depends on it.
    """

    kind: str
    name: str
    inputs: list[_Value]
    bytes: int
    body: Launches | None = None
    live: bool = False


class _Body:
    """Of a function or of a loop."""

    def __init__(self, functions: Mapping[str, Any], outside: Mapping[Any, _Value]) -> None:
        self.functions, self.outside = functions, outside
        self.made: list[_Value] = []
        self.launches: list[_Launch] = []

    def count(self, block: Any) -> Launches:
        """All of `block` that what it returns depends on; its arguments stand in memory."""
        values = {argument: _Value(_bytes(argument.type)) for argument in block.arguments}
        outputs = self.run(block, values)
        _keep(outputs)
        for value in outputs:
            value.wanted = True
        found = Launches()
        for launch in self.launches:
            if launch.live:
                _count(launch, found)
        made = [value for value in self.made if value.live]
        readers: dict[tuple[_Value, int], _Value] = {}
        for value in made:
            for one in value.inputs or ():
                if one.inputs is None and not one.free:
                    readers.setdefault((one, value.stage), value).join(value)
                elif one.stage == value.stage and not one.free:
                    one.join(value)
        groups: dict[_Value, list[_Value]] = {}
        for value in made:
            groups.setdefault(value.root(), []).append(value)
        for group in groups.values():
            if written := [value for value in group if value.wanted or value.reduced]:
                found.fusions += 1
                found.bytes += sum(value.bytes for value in written) + _read(set(group), written)
        return found

    def run(self, block: Any, values: dict[Any, _Value]) -> list[_Value]:
        """Go through the operations; returns what the block returns."""
        for operation in block.operations:
            inputs = [values[one] if one in values else self.captured(one) for one in operation.operands]
            name = operation.operation.name.partition(".")[2]
            if name == "return":
                return inputs
            values.update(zip(operation.results, self.apply(name, operation, inputs, values), strict=True))
        return []

    def captured(self, operand: Any) -> _Value:
        """What a loop reads from outside, where it has to stand in memory."""
        value = self.outside[operand]
        _keep([value])
        value.wanted = True
        return _Value(value.bytes, free=value.free)

    def apply(self, name: str, operation: Any, inputs: list[_Value], values: dict[Any, _Value]) -> list[_Value]:
        """The results of one operation."""
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
            raise ValueError(f"How many launches {operation.operation.name} takes is not known.")
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
        """Its results, which stand in memory."""
        self.launches.append(launch)
        return [_Value(size, stage + 1, maker=launch) for size in results]

    def reduction(self, operation: Any, inputs: list[_Value], results: list[int], stage: int) -> list[_Value]:
        """Results are made in the group of their inputs, and stand in memory for those behind it."""
        made = [_Value(size, stage, inputs, reduced=True) for size in results]
        for one in made[1:]:
            one.join(made[0])
        self.made += made
        return [_Value(one.bytes, stage + 1, maker=one, free=_single(operation)) for one in made]


def _keep(values: list[_Value]) -> None:
    """Mark all that `values` depend on as live, and what their launches read as wanted."""
    rest: list[_Value | _Launch] = list(values)
    while rest:
        one = rest.pop()
        if one.live:
            continue
        one.live = True
        if isinstance(one, _Value) and one.maker is not None:
            rest.append(one.maker)
        if isinstance(one, _Launch) and one.name != "scatter":
            for value in one.inputs:
                value.wanted = True
        rest += one.inputs or []


def _count(launch: _Launch, found: Launches) -> None:
    match launch.kind:
        case "product":
            found.products += 1
        case "kernel":
            found.kernels[launch.name] += 1
        case "loop" if launch.body:
            found.loops.append(launch.body)
        case _:
            found.others[launch.name] += 1
    if launch.kind in ("product", "other"):
        found.bytes += launch.bytes + sum(value.bytes for value in set(launch.inputs))


def _read(inside: set[_Value], written: list[_Value]) -> int:
    """Bytes that a group reads: of what stands in memory, each value once; what does not is made again."""
    found: dict[_Value, int] = {}
    rest, seen = list(written), set(written)
    while rest:
        value = rest.pop()
        for one in value.inputs or ():
            if one.inputs is None or (one.wanted and one not in inside):
                size = min(value.bytes, one.bytes) if value.sliced else one.bytes
                found[one] = 0 if one.free else max(found.get(one, 0), size)
            elif one not in seen:
                seen.add(one)
                rest.append(one)
    return sum(found.values())


def _kernel_name(operation: Any) -> str:
    attributes = operation.attributes
    return attributes["mhlo.backend_config" if "mhlo.backend_config" in attributes else "backend_config"]["name"].value


def _single(operation: Any) -> bool:
    return all(not result.type.shape for result in operation.results)


def _bytes(kind: Any) -> int:
    """Of a tensor; those of 1 bit take a byte."""
    digits = re.search(r"\d+", str(kind.element_type))
    return math.prod(kind.shape) * max(int(digits.group()) if digits else 0, 8) // 8
