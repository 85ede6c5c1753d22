"""Makes files of every format with the libraries that make them elsewhere."""

import numpy as np
import pyarrow as pa
import pytest

from zaya_jax.data.readers.inputs import read_unit


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
