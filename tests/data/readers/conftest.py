"""Makes files of every format with the libraries that make them elsewhere."""

import json
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from zaya_jax.data.readers.read import read_unit

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


@pytest.fixture(scope="session")
def read_all():
    """What the units hold, as plain tuples: (line, value) of documents, (line, reason) of bad places."""

    def read(units, field="text"):
        documents, bad = [], []
        for unit in units:
            for item in read_unit(unit, field=field):
                if hasattr(item, "reason"):
                    bad.append((item.line, item.reason))
                else:
                    value = item.value.tolist() if isinstance(item.value, np.ndarray) else item.value
                    documents.append((item.line, value))
        return documents, bad

    return read


@pytest.fixture(scope="session")
def zstd():
    """One zstd frame."""

    def compress(data: bytes) -> bytes:
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(data)
        return sink.getvalue().to_pybytes()

    return compress


@pytest.fixture(scope="session")
def write_arrow():
    """Write batches of texts as an IPC stream, as `datasets` does, or as an IPC file; returns the path."""

    def write(path: Path, batches, *, stream=True, column="text", kind=None, compression=None) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        made = [pa.array(batch, kind or pa.string()) for batch in batches]
        schema = pa.schema([("id", pa.int64()), (column, kind or pa.string())])
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with (pa.ipc.new_stream if stream else pa.ipc.new_file)(str(path), schema, options=options) as writer:
            for array in made:
                writer.write_batch(pa.record_batch([pa.array(range(len(array)), pa.int64()), array], schema=schema))
        return path

    return write


@pytest.fixture(scope="session")
def write_saved(write_arrow):
    """Write a folder as `save_to_disk` does; `shards` are lists of batches of texts."""

    def write(folder: Path, shards) -> Path:
        names = [f"data-{i:05d}-of-{len(shards):05d}.arrow" for i in range(len(shards))]
        for name, batches in zip(names, shards, strict=True):
            write_arrow(folder / name, batches)
        (folder / "state.json").write_text(
            json.dumps({"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": None})
        )
        (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
        return folder

    return write


@pytest.fixture(scope="session")
def write_megatron():
    """Write documents, each a list of sequences of ids, as PATH.bin and PATH.idx; returns the `.bin`."""

    def write(path: Path, documents, dtype="uint16") -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        sequences = [np.array(ids, dtype) for document in documents for ids in document]
        lengths = np.array([len(ids) for ids in sequences], "<i4")
        sizes = lengths.astype("<i8") * np.dtype(dtype).itemsize
        indices = np.cumsum([0, *map(len, documents)]).astype("<i8")
        header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, CODES[dtype], len(sequences), len(indices))
        pointers = (np.cumsum(sizes) - sizes).astype("<i8")
        Path(f"{path}.idx").write_bytes(header + lengths.tobytes() + pointers.tobytes() + indices.tobytes())
        Path(f"{path}.bin").write_bytes(b"".join(ids.tobytes() for ids in sequences))
        return Path(f"{path}.bin")

    return write
