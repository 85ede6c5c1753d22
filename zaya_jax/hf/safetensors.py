"""Files of tensors in the safetensors format: headers read with suspicion, files written as a stream.

The format: eight bytes, the header's length; the header, a JSON object from names to dtype, shape and place;
the tensors' bytes, without gaps. The package `safetensors` writes only what is in memory all at once, and what it
says of a damaged file names neither tensor nor remedy; hence this module. Each reads what the other wrote.
"""

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # numpy's bfloat16; jax itself depends on it
import numpy as np

from zaya_jax.errors import InputError
from zaya_jax.run.files import require_regular

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
Buffer = bytes | memoryview
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Known to the format, but of no parameter here.
_OTHERS = {"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F8_E4M3", "F8_E5M2", "F8_E8M0",
           "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F6_E2M3", "F6_E3M2", "F4", "C64"}  # fmt: skip
_LONGEST_HEADER = 2**24  # bytes; the legacy 74B, of 60 layers with 24 experts each, needs a twentieth
_LONGEST_NAME = 1000  # characters


@dataclasses.dataclass(frozen=True)
class Described:
    """What must be known of a tensor before a file is begun."""

    dtype: np.dtype  # one of `DTYPES`
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Stored(Described):
    """One tensor of a file."""

    path: Path
    start: int  # of its bytes, from the beginning of the file

    def open(self) -> np.ndarray:
        """Its content, mapped read-only: memory is taken by what is touched, and given back with the array."""
        if self.bytes == 0:
            return np.empty(self.shape, self.dtype)
        raw = np.memmap(self.path, np.uint8, "r", self.start, (self.bytes,))
        return raw.view(self.dtype).reshape(self.shape)


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a file, by name; none of them is read.

    Raises:
      InputError: the file is missing, cut off or damaged, or has a tensor of a dtype that no parameter has; the file
        and the tensor are named.
    """
    try:
        require_regular(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(_LONGEST_HEADER, size - 8):
                raise _damaged(path, f"its header is said to be {length} bytes long, the file has {size}")
            raw = file.read(length)
    except InputError:
        raise
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing.") from error
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{str(path)!r} cannot be read: {why}.") from error
    if len(raw) != length:
        raise _damaged(path, f"its header of {length} bytes is cut off")
    header = _parse(path, raw)
    tensors = {name: _stored(path, name, entry, 8 + length) for name, entry in header.items()}
    end, last = 8 + length, ""
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].bytes)):
        if stored.start != end:
            what = f"overlaps the tensor {last}" if stored.start < end else "follows a gap"
            raise _damaged(path, f"the tensor {name} {what}")
        end, last = end + stored.bytes, name
    if end != size:
        what = f"the tensor {last} ends" if tensors else "its header ends"
        raise _damaged(path, f"{what} at byte {end}, the file at byte {size}")
    return tensors


def _damaged(path: Path, what: str) -> InputError:
    return InputError(f"{path} is not a whole safetensors file: {what:.500}.")


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        tree = dict(pairs)
        if len(tree) != len(pairs):
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise _damaged(path, f"its header has {twice!r} twice")
        return tree

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=once) if raw[:1] == b"{" else None
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(path, "its __metadata__ is not a map from text to text")
    return header


def _stored(path: Path, name: str, entry: Any, base: int) -> Stored:
    if len(name) > _LONGEST_NAME:
        raise _damaged(path, f"the name of a tensor has {len(name)} characters ({name:.50}…)")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"the tensor {name} is not given by dtype, shape and data_offsets")
    shape, offsets, dtype = entry["shape"], entry["data_offsets"], entry["dtype"]
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(size) is int and 0 <= size < 2**63 for size in numbers):
            raise _damaged(path, f"the tensor {name} has the shape {shape} and the data_offsets {offsets}")
    if isinstance(dtype, str) and dtype in _OTHERS:
        raise InputError(f"The tensor {name} in {path} is of dtype {dtype}, but parameters are {', '.join(DTYPES)}: "
                         "the released FP8 and MXFP4 variants are not supported.")  # fmt: skip
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _damaged(path, f"the tensor {name} is of the unknown dtype {dtype!r}")
    stored = Stored(DTYPES[dtype], tuple(shape), path, base + offsets[0] if offsets else base)
    if len(offsets) != 2 or offsets[1] - offsets[0] != stored.bytes:
        raise _damaged(path, f"the tensor {name} of dtype {dtype} and shape {shape} takes {stored.bytes} bytes, but "
                             f"its data_offsets are {offsets}")  # fmt: skip
    return stored


def write_file(path: Path, described: Mapping[str, Described], content: Iterable[tuple[str, Iterable[Buffer]]]) -> None:
    """Write a file, tensor by tensor; it has its name only once it is whole and on the disk.

    Args:
      path: of the file, which is overwritten.
      described: its tensors, in the order in which they come.
      content: of each tensor its name and, piece by piece, its bytes.

    Raises:
      ValueError: `content` is not what `described` says.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # which transformers insists on
    end = 0
    for name, tensor in described.items():
        start, end = end, end + tensor.bytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors begin at multiples of their dtype's size
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        names = iter(described)
        for name, pieces in content:
            if (expected := next(names, None)) != name:
                raise ValueError(f"The tensor {name} comes where {expected} was announced.")
            written = sum(file.write(piece) for piece in pieces)
            if written != described[name].bytes:
                raise ValueError(f"{written} bytes came of the tensor {name}, announced were {described[name].bytes}.")
        if (missing := next(names, None)) is not None:
            raise ValueError(f"The tensor {missing} was announced and never came.")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
