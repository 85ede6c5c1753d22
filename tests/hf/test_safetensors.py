"""Files of tensors: the package's and ours are one format, and damaged ones are told apart before memory is taken."""

import contextlib
import json
import struct
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from zaya_jax.errors import InputError
from zaya_jax.hf.safetensors import DTYPES, TensorHeader, read_header, write_file

KINDS = list(DTYPES.values())


@st.composite
def arrays(draw):
    """Tensors of every dtype, some empty, some without axes; any bits, NaN among them."""
    tensors = {}
    for name in draw(st.lists(st.text(min_size=1, max_size=9).filter(lambda text: text != "__metadata__"), unique=True,
                              max_size=5)):  # fmt: skip
        kind, shape = draw(st.sampled_from(KINDS)), tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        size = int(np.prod(shape)) * kind.itemsize
        raw = draw(st.binary(min_size=size, max_size=size))
        tensors[name] = np.frombuffer(raw, kind).reshape(shape)
    return tensors


def write(path, tensors):
    described = {name: TensorHeader(x.dtype, x.shape) for name, x in tensors.items()}
    write_file(path, described, (x.tobytes() for x in tensors.values()))


def bits(tensors):
    return {name: (x.dtype, x.shape, x.tobytes()) for name, x in tensors.items()}


@given(tensors=arrays())
def test_each_reads_what_the_other_wrote(tensors, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    write(folder / "ours", tensors)
    assert bits(load_file(folder / "ours")) == bits(tensors)
    with safe_open(folder / "ours", "np") as file:
        assert file.metadata() == {"format": "pt"}
    save_file(tensors, folder / "theirs", {"format": "pt"})
    for path in (folder / "ours", folder / "theirs"):
        assert bits({name: stored.open() for name, stored in read_header(path).items()}) == bits(tensors)


def test_tensors_begin_at_multiples_of_eight(tmp_path):
    for length in range(1, 9):
        write(tmp_path / "file", {"x" * length: np.ones(3)})
        assert read_header(tmp_path / "file")["x" * length].start % 8 == 0


def test_a_file_has_its_name_once_it_is_whole(tmp_path):
    path, described = tmp_path / "file", {"a": TensorHeader(KINDS[0], (2,)), "b": TensorHeader(KINDS[0], (1,))}
    path.write_bytes(b"before")

    def content(*sizes):
        for size in sizes:
            assert path.read_bytes() == b"before"
            yield b"x" * size

    for wrong, said in (([16], "shorter"), ([15, 8], "The tensor a has 15 bytes"), ([16, 8, 1], "longer")):
        with pytest.raises(ValueError, match=said):
            write_file(path, described, content(*wrong))
        assert path.read_bytes() == b"before"
    write_file(path, described, content(16, 8))
    assert set(read_header(path)) == {"a", "b"}


def raw_file(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def refused(path):
    with pytest.raises(InputError) as caught:
        read_header(path)
    assert str(caught.value).count(str(path)) == 1
    return str(caught.value)


@pytest.mark.parametrize(("header", "data"), [
    ({"x": entry()}, b"1234567"),
    ({"x": entry()}, b"123456789"),
    ({}, b"1"),
    ({"x": entry(), "y": entry(offsets=(4, 12))}, b"123456789012"),
    ({"x": entry(), "y": entry(offsets=(0, 8))}, b"12345678"),
    ({"x": entry(offsets=(4, 12))}, b"123456789012"),
    ({"x": entry(shape=(3,))}, b"12345678"),
    ({"x": entry(shape=(-2,))}, b"12345678"),
    ({"x": entry(shape=(2**40, 2**40))}, b"12345678"),
    ({"x": entry(offsets=(0, 10**15), shape=(250_000_000_000_000,))}, b"12345678"),
    ({"x": entry("F128")}, b"12345678"),
    ({"x": {"dtype": "F32"}}, b""),
    ({"__metadata__": ["a"]}, b""),
    # Of two tensors of one name, the bytes of the first would be a gap.
    (b'{"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, '
     b'"x": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}', b"12"),
    (b"[]", b""),
    (b"", b""),
    (b'{"\xff": 1}', b""),
    (b'{"x":' * 100_000 + b"1" + b"}" * 100_000, b""),
])  # fmt: skip
def test_a_damaged_file_is_refused(header, data, tmp_path):
    raw_file(tmp_path / "file", header, data)
    assert "is not a valid safetensors file: " in refused(tmp_path / "file")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from(["F32", "U8"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=9,
)
ENTRIES = st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), VALUES) | VALUES


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("any") / "file"


@settings(max_examples=3 * settings.default.max_examples)
@given(header=st.dictionaries(st.text(max_size=9) | st.just("__metadata__"), ENTRIES, max_size=4) | VALUES,
       data=st.binary(max_size=20))  # fmt: skip
def test_a_header_of_any_json_is_read_or_refused(file, header, data):
    raw_file(file, header, data)
    with contextlib.suppress(InputError):
        read_header(file)


@pytest.mark.parametrize(("dtype", "size"), [("F8_E4M3", 8), ("F8_E5M2", 8), ("F4", 16), ("I64", 1), ("BOOL", 8)])
def test_the_quantized_variants_are_refused_by_name(dtype, size, tmp_path):
    raw_file(tmp_path / "file", {"x.weight": entry(dtype, (size,))}, b"12345678")
    message = refused(tmp_path / "file")
    assert f"The tensor x.weight in {tmp_path / 'file'} has dtype {dtype}" in message
    assert "FP8 and MXFP4 variants are not supported" in message


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**9, 1000])
def test_a_header_longer_than_the_file_takes_no_memory(length, tmp_path):
    raw_file(tmp_path / "file", {"x": entry()}, b"12345678", length)
    tracemalloc.start()
    assert "header" in refused(tmp_path / "file")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def test_a_header_too_long_to_be_one_is_refused(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        file.write(struct.pack("<Q", 2**30))
        file.truncate(2**31)  # sparse
    assert "header too large" in refused(tmp_path / "file")


@pytest.mark.parametrize("keep", [0, 3, 8, 20, -1])
def test_a_truncated_file_is_refused(keep, tmp_path):
    write(tmp_path / "file", {"x": np.ones(4)})
    (tmp_path / "file").write_bytes((tmp_path / "file").read_bytes()[:keep])
    refused(tmp_path / "file")


def test_missing_files_and_folders_are_named(tmp_path):
    assert "is missing" in refused(tmp_path / "nothing")
    assert "cannot be read" in refused(tmp_path)


def test_values_are_mapped_and_read_only(tmp_path):
    values = np.arange(4, dtype=ml_dtypes.bfloat16)
    write(tmp_path / "file", {"pad": np.ones(1, np.float16), "x": values})
    stored = read_header(tmp_path / "file")["x"]
    assert stored.bytes == 8
    with pytest.raises(ValueError, match="read-only"):
        stored.open()[0] = 1
