"""Measured implementations of the operations on one kind of device; `machine kernels --tune` writes such a table.

A table belongs to the sources of the kernels that it was measured with: what it says of an operation whose sources have
changed since is not used.
"""

import functools
import importlib.util
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pallas_kernels.tiles import Tile, tiles
from zaya_jax.config.checks import shown
from zaya_jax.errors import InputError
from zaya_jax.ops.operation import Kernel, Operation
from zaya_jax.ops.target import Target
from zaya_jax.run.digests import digest
from zaya_jax.run.files import expanded, read_object

REFERENCE = "reference"  # name of the implementation that XLA compiles from plain JAX
_SHIPPED = Path(__file__).parent / "tables"
# What changes no result: docstrings, comments, white space at the end of a line.
_IGNORED = re.compile(r'[ \t]*"""[\s\S]*?"""|[ \t]*#.*|[ \t]+$', re.MULTILINE)
_IMPORTS = re.compile(r"^ *from (pallas_kernels|zaya_jax\.ops)(\S*) import ([^(\n]+|\([^)]*)", re.MULTILINE)
# Modules that select and check kernels, name them, or store what they compute.
_APART = {f"zaya_jax.ops.{name}" for name in
          ("cached_attention", "kernel_table", "names", "operation", "parts", "registry", "target")}  # fmt: skip


class Choice(NamedTuple):
    """The fastest implementation of an operation at one size."""

    rows: int  # the first value of `Operation.shape`
    kernel: str  # name of a kernel, or `REFERENCE`
    tiles: tuple[tuple[str, Tile], ...] = ()  # of the kernel, sorted by name; defaults for others
    dtype: str = ""  # of the activations with which they were measured

    @property
    def variant(self) -> str:
        """Name the kernel, and its tiles if it has any."""
        sizes = ("×".join(map(str, tile.sizes)) + f"/{tile.warps}/{tile.stages}" for _, tile in self.tiles)
        return f"{self.kernel} ({', '.join(sizes)})" if self.tiles else self.kernel


@dataclass(frozen=True)
class KernelTable:
    """A table, as it was read."""

    text: str  # JSON
    source: str  # where it is from

    @functools.cached_property
    def content(self) -> dict[str, Any]:
        """The table as nested dicts."""
        return json.loads(self.text)

    @property
    def digest(self) -> str:
        """Digest of the text, which runs and checkpoints record."""
        return digest(self.text.encode())

    def choices(
        self, operation: Operation, modules: Sequence[str], target: Target, dtype: str, widths: Sequence[int]
    ) -> tuple[tuple[Choice, ...], str]:
        """Return what was measured for an operation at these widths, and a sentence if it cannot be used.

        `modules` are those of the operation that was measured, `dtype` is that of activations, `widths` are
        `Operation.shape` without the rows.
        """
        name = operation.measured_as or operation.name
        row = self.content["operations"].get(name)
        if row is None or not row["sizes"]:
            return (), f"{name} was not measured"
        if row["sources"] != sources_digest(*modules):
            return (), f"{name} was measured with other kernels than this version's"
        kernels, measured = {kernel.name: kernel for kernel in operation.kernels}, []
        note = f"{name} was not measured in {dtype} at widths {list(widths)}"
        for size in row["sizes"]:
            if size["dtype"] != dtype or size["widths"] != list(widths):
                continue
            choice = read_choice(size)
            kernel = kernels.get(choice.kernel)
            if kernel is None and operation.measured_as and choice.kernel != REFERENCE:
                note = ""  # a kernel that gives no other outputs
                continue
            own = tiles_of(kernel, target, dtype) if kernel else {}
            declared = all(tile in own.get(name, ()) for name, tile in choice.tiles)
            if declared and (kernel or choice.kernel == REFERENCE):
                measured.append(choice)
            else:
                note = f"this version has no {choice.variant} for {name}, which was measured"
        return tuple(measured), "" if measured else note


def read_choice(size: Mapping[str, Any]) -> Choice:
    """Return the choice of one size in a table."""
    chosen = tuple((name, Tile(tuple(sizes), *rest)) for name, (sizes, *rest) in sorted(size["tiles"].items()))
    return Choice(size["rows"], size["implementation"], chosen, size["dtype"])


def tiles_of(kernel: Kernel, target: Target, dtype: str) -> dict[str, tuple[Tile, ...]]:
    """Return the declared tiles of a kernel by name, the default first."""
    return {name: tiles(name, target.architecture, dtype) for name in kernel.tiles}


def nearest(choices: Sequence[Choice], rows: int) -> Choice:
    """Return the choice that was measured with the number of rows nearest to `rows`, by ratio."""
    return min(choices, key=lambda choice: abs(math.log(choice.rows / max(rows, 1))))


@functools.cache
def sources_digest(*modules: str) -> str:
    """Return a digest of the sources of an operation's modules and of the kernels and operations that they import."""
    texts, pending = dict[str, str](), [*modules]
    while pending:
        name = pending.pop()
        spec = None if name in (*texts, *_APART, "pallas_kernels.tiles") else importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            text = Path(spec.origin).read_text(encoding="utf-8")
            texts[name] = "\n".join(filter(None, _IGNORED.sub("", text).splitlines()))
            for package, rest, names in _IMPORTS.findall(text):
                pending += [package + rest] if rest else [f"{package}.{each}" for each in re.findall(r"\w+", names)]
    return digest("\n".join(f"{name} {texts[name]}" for name in sorted(texts)).encode())[:16]


def own_table(device_kind: str) -> Path:
    """Return the file of the user's own table for a kind of device."""
    cache = expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return cache / "zaya_jax" / "kernels" / f"{_file_name(device_kind)}.json"


def _file_name(device_kind: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_")


def read_tables(say: Callable[[str], object], device_kind: str = "") -> Iterator[KernelTable]:
    """Yield the user's own tables, then those that ship, of a kind of device or of all; `say` as in `find_table`."""
    for folder in (own_table(device_kind).parent, _SHIPPED):
        for path in sorted(folder.glob(f"{_file_name(device_kind) or '*'}.json")):
            try:
                content = read_object(path)
                yield parse_table(content, device_kind or str(content.get("device")), str(path))
            except (InputError, OSError) as error:
                say(f"Not used: {error}")


def find_table(target: Target, say: Callable[[str], object]) -> KernelTable | None:
    """Return the user's own table for a device, with what it lacks from the one that ships, or None without any.

    `say` is called with a sentence about a table that cannot be used.
    """
    tables = list(read_tables(say, target.device_kind))
    if len(tables) <= 1:
        return tables[0] if tables else None
    own, shipped = (table.content for table in tables)
    both = {"device": own["device"], "operations": merged(shipped["operations"], own["operations"])}
    return KernelTable(json.dumps(both, sort_keys=True), " and ".join(table.source for table in tables))


def merged(before: Mapping[str, Any], operations: Mapping[str, Any]) -> dict[str, Any]:
    """Add to a table's operations what was measured before with the same sources, at other sizes."""
    both = {name: row for name, row in before.items() if name not in operations}
    for name, row in operations.items():
        same = before.get(name, {"sources": ""})["sources"] == row["sources"]
        keys = [size_key(size) for size in row["sizes"]]
        kept = [size for size in before[name]["sizes"] if size_key(size) not in keys] if same else []
        both[name] = {**row, "sizes": [*kept, *row["sizes"]]}
    return both


def size_key(size: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what identifies a size of an operation."""
    return size["dtype"], size["rows"], tuple(size["widths"])


def parse_table(content: Mapping[str, Any], device_kind: str, source: str) -> KernelTable:
    """Check a table; `source` is where it is from, for messages.

    `InputError` if it is for another device, or is no table.
    """
    table = KernelTable(json.dumps(content, sort_keys=True), source)
    try:
        device = str(content["device"])
        for row in content["operations"].values():
            if not (isinstance(row["sources"], str) and all(map(_is_size, row["sizes"]))):
                raise ValueError
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(f"{source} is not a table of measured kernels. Measure again with --tune.") from error
    if device != device_kind:
        raise InputError(f"The kernels in {source} were measured on {shown(device)}, not on {device_kind}.")
    return table


def _is_size(size: Mapping[str, Any]) -> bool:
    numbers = [size["rows"], *size["widths"]]
    for sizes, warps, stages in size["tiles"].values():
        numbers += [*sizes, warps, stages]
    whole = all(type(number) is int and number >= 0 for number in numbers) and size["rows"] > 0
    return whole and isinstance(size["dtype"], str) and isinstance(size["implementation"], str)
