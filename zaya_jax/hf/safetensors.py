"""Read headers of safetensors files, and write such files as a stream.

A file has the header's length (8 bytes), the header (a JSON object from names to dtype, shape and offsets), and the
bytes of the tensors without gaps. The package `safetensors` reads and checks headers; it can only write tensors that
are all in memory.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # numpy's bfloat16; jax itself depends on it
import numpy as np
from safetensors import SafetensorError, safe_open

from zaya_jax.errors import InputError
from zaya_jax.run.files import open_regular
from zaya_jax.run.writing import new_file

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class TensorHeader:
    """Dtype and shape of a tensor, which the header needs before any data is written."""

    dtype: np.dtype  # one of `DTYPES`
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class TensorFile(TensorHeader):
    """A tensor in a file."""

    path: Path
    start: int  # byte offset in the file

    def open(self) -> np.ndarray:
        """Map the content read-only; pages are loaded when touched, and freed with the array."""
        if self.bytes == 0:
            return np.empty(self.shape, self.dtype)
        raw = np.memmap(self.path, np.uint8, "r", self.start, (self.bytes,))
        return raw.view(self.dtype).reshape(self.shape)


def read_header(path: Path) -> dict[str, TensorFile]:
    """Locate the tensors of a file by name, without reading them.

    `InputError` if the file is missing, truncated or damaged, or a tensor has an unsupported dtype.
    """
    tensors = dict[str, TensorFile]()
    try:
        with open_regular(path) as file:
            start = 8 + int.from_bytes(file.read(8), "little")
        with safe_open(path, framework="numpy") as file:
            for name in file.offset_keys():  # in their order in the file, which has no gaps
                tensor = file.get_slice(name)
                if (dtype := tensor.get_dtype()) not in DTYPES:
                    allowed = f"{', '.join(DTYPES)}; the released FP8 and MXFP4 variants are not supported."
                    raise InputError(f"The tensor {name} in {path} has dtype {dtype}, but must be one of {allowed}")
                tensors[name] = TensorFile(DTYPES[dtype], tuple(tensor.get_shape()), path, start)
                start += tensors[name].bytes
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing.") from error
    except SafetensorError as error:
        raise InputError(f"{path} is not a valid safetensors file: {error!s:.500}.") from error
    except (OSError, ValueError) as error:  # ValueError: an invalid path
        if isinstance(error, InputError):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{str(path)!r} cannot be read: {reason}.") from error
    return tensors


def write_file(path: Path, described: Mapping[str, TensorHeader], content: Iterable[bytes | memoryview]) -> None:
    """Write or replace a file tensor by tensor, atomically and durably.

    `content` has the bytes of each tensor of `described`, in that order; ValueError if these are not all.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    end = 0
    for name, tensor in described.items():
        start, end = end, end + tensor.bytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors to the size of their dtype
    with new_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, tensor), data in zip(described.items(), content, strict=True):
            if (written := file.write(data)) != tensor.bytes:
                raise ValueError(f"The tensor {name} has {written} bytes, but {tensor.bytes} were declared.")
