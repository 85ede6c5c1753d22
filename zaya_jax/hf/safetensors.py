"""Read headers of safetensors files with strict checks, and write such files as a stream.

A file has the header's length (8 bytes), the header (a JSON object from names to dtype, shape and offsets), and the
bytes of the tensors without gaps. The package `safetensors` can only write tensors that are all in memory, and its
errors name neither the tensor nor a remedy. The two implementations read each other's files.
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
# Valid in the format, but not supported for parameters.
_OTHERS = {"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F8_E4M3", "F8_E5M2", "F8_E8M0",
           "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F6_E2M3", "F6_E3M2", "F4", "C64"}  # fmt: skip
_LONGEST_HEADER = 2**24  # bytes; 20 times the header of the legacy 74B
_LONGEST_NAME = 1000  # characters


@dataclasses.dataclass(frozen=True)
class Described:
    """Dtype and shape of a tensor, which the header needs before any data is written."""

    dtype: np.dtype  # one of `DTYPES`
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Stored(Described):
    """A tensor in a file."""

    path: Path
    start: int  # byte offset in the file

    def open(self) -> np.ndarray:
        """Map the content read-only; pages are loaded when touched, and freed with the array."""
        if self.bytes == 0:
            return np.empty(self.shape, self.dtype)
        raw = np.memmap(self.path, np.uint8, "r", self.start, (self.bytes,))
        return raw.view(self.dtype).reshape(self.shape)


def read_header(path: Path) -> dict[str, Stored]:
    """Locate the tensors of a file by name, without reading them.

    Raises:
      InputError: the file is missing, truncated or damaged, or a tensor has an unsupported dtype.
    """
    try:
        require_regular(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(_LONGEST_HEADER, size - 8):
                raise _damaged(path, f"its header claims {length} bytes, but the file has {size}")
            raw = file.read(length)
    except InputError:
        raise
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing.") from error
    except (OSError, ValueError) as error:  # ValueError: an invalid path
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{str(path)!r} cannot be read: {why}.") from error
    if len(raw) != length:
        raise _damaged(path, f"its header of {length} bytes is truncated")
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
        raise _damaged(path, f"{what} at byte {end}, but the file ends at byte {size}")
    return tensors


def _damaged(path: Path, what: str) -> InputError:
    return InputError(f"{path} is not a valid safetensors file: {what:.500}.")


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        tree = dict(pairs)
        if len(tree) != len(pairs):
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise _damaged(path, f"its header lists {twice!r} twice")
        return tree

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=once) if raw[:1] == b"{" else None
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(path, "its __metadata__ is not a map from text to text")
    return header


def _stored(path: Path, name: str, entry: Any, base: int) -> Stored:
    if len(name) > _LONGEST_NAME:
        raise _damaged(path, f"the name of a tensor has {len(name)} characters ({name:.50}…)")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"the tensor {name} must have dtype, shape and data_offsets")
    shape, offsets, dtype = entry["shape"], entry["data_offsets"], entry["dtype"]
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(size) is int and 0 <= size < 2**63 for size in numbers):
            raise _damaged(path, f"the tensor {name} has the invalid shape {shape} or data_offsets {offsets}")
    if isinstance(dtype, str) and dtype in _OTHERS:
        raise InputError(f"The tensor {name} in {path} has dtype {dtype}, but must be one of {', '.join(DTYPES)}; the "
                         "released FP8 and MXFP4 variants are not supported.")  # fmt: skip
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _damaged(path, f"the tensor {name} has the unknown dtype {dtype!r}")
    stored = Stored(DTYPES[dtype], tuple(shape), path, base + offsets[0] if offsets else base)
    if len(offsets) != 2 or offsets[1] - offsets[0] != stored.bytes:
        raise _damaged(path, f"the tensor {name} of dtype {dtype} and shape {shape} takes {stored.bytes} bytes, but "
                             f"its data_offsets are {offsets}")  # fmt: skip
    return stored


def write_file(path: Path, described: Mapping[str, Described], content: Iterable[tuple[str, Iterable[Buffer]]]) -> None:
    """Write a file tensor by tensor, atomically and durably.

    Args:
      path: of the file; an existing one is replaced.
      described: the tensors, in order.
      content: name of each tensor and the pieces of its bytes.

    Raises:
      ValueError: `content` does not match `described`.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    end = 0
    for name, tensor in described.items():
        start, end = end, end + tensor.bytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors to the size of their dtype
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        names = iter(described)
        for name, pieces in content:
            if (expected := next(names, None)) != name:
                raise ValueError(f"The tensor {name} was written where {expected} was declared.")
            written = sum(file.write(piece) for piece in pieces)
            if written != described[name].bytes:
                raise ValueError(f"The tensor {name} has {written} bytes, but {described[name].bytes} were declared.")
        if (missing := next(names, None)) is not None:
            raise ValueError(f"The tensor {missing} was declared but not written.")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
