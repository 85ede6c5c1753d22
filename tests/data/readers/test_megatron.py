import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.prepare_helpers import write_megatron
from zaya_jax.data.readers.documents import Unit
from zaya_jax.data.readers.inputs import list_units
from zaya_jax.data.readers.megatron import open_index, read_megatron
from zaya_jax.errors import InputError

HEADER = 34
ids = st.integers(0, 127)  # in every dtype
documents = st.lists(st.lists(st.lists(ids, max_size=5), max_size=3), min_size=1, max_size=12)


def one_unit(path):
    return Unit("megatron", (str(path),), 0, len(open_index(str(path)).bounds) - 1, path.stat().st_size)


@given(
    documents=documents.filter(lambda docs: any(ids for sequences in docs for ids in sequences)),
    dtype=st.sampled_from(["uint8", "int8", "int16", "int32", "int64", "uint16"]),
    unit_bytes=st.integers(1, 200),
)
def test_units_of_any_size_give_every_document_once_in_order(tmp_path_factory, read_all, documents, dtype, unit_bytes):
    path = write_megatron(tmp_path_factory.mktemp("megatron") / "a", documents, dtype)
    units = list_units([path], unit_bytes=unit_bytes)
    assert sum(unit.bytes for unit in units) == path.stat().st_size
    joined = [(n, [i for ids in sequences for i in ids]) for n, sequences in enumerate(documents, 1)]
    assert read_all(units) == ([(n, ids) for n, ids in joined if ids], [(n, "empty") for n, ids in joined if not ids])


def test_ids_are_a_copy_with_the_dtype_of_the_file(tmp_path):
    path = write_megatron(tmp_path / "a", [[[1, 65535], [7]], [[2]]])
    first, second = read_megatron(one_unit(path))
    assert type(first.value) is np.ndarray
    assert first.value.dtype == np.uint16
    assert first.value.tolist() == [1, 65535, 7]
    assert (first.bytes, second.bytes, second.line, second.file) == (6, 2, 2, str(path))
    first.value[:] = 0
    assert path.read_bytes() == np.array([1, 65535, 7, 2], "<u2").tobytes()


def test_sequences_may_lie_anywhere_in_the_bin(tmp_path, read_all):
    path = write_megatron(tmp_path / "a", [[[1], [2]], [[3]]], "int32")
    data = bytearray(Path(tmp_path / "a.idx").read_bytes())
    data[HEADER + 12 : HEADER + 36] = np.array([8, 1, 0], "<i8").tobytes()
    (tmp_path / "a.idx").write_bytes(data)
    ids = [int.from_bytes(path.read_bytes()[place : place + 4], "little") for place in (8, 1, 0)]
    assert read_all([one_unit(path)]) == ([(1, ids[:2]), (2, ids[2:])], [])


def put(offset, code, value):
    return lambda data: data[:offset] + struct.pack(code, value) + data[offset + struct.calcsize(code) :]


# Two documents, of two sequences and one; the arrays begin at 34, 46 and 70, and the file ends at 94.
DAMAGE = {
    "magic": (put(0, "<B", 0), "is not a Megatron index"),
    "short header": (lambda data: data[:20], "is not a Megatron index"),
    "empty": (lambda data: b"", "is not a Megatron index"),
    "version": (put(9, "<Q", 2), "has version 2, but only version 1 is supported"),
    "float": (put(17, "<B", 7), r"dtype code 7 .*; allowed are 1 \(uint8\), .*8 \(uint16\)"),
    "code": (put(17, "<B", 9), "dtype code 9"),
    "too many sequences": (put(18, "<Q", 2**62), "has 94 bytes, but its header lists"),
    "no document indices": (put(26, "<Q", 0), "lists 3 sequences and 0 document indices"),
    "cut": (lambda data: data[:-1], "has 93 bytes, but .* which take 94"),
    "longer": (lambda data: data + b"0", "has 95 bytes, but .* which take 94"),
    "negative length": (put(38, "<i", -1), "puts sequence 1 at byte 4 with -1 tokens"),
    "long sequence": (put(42, "<i", 3), "puts sequence 2 at byte 6 with 3 tokens, but its .bin has 10 bytes"),
    "negative pointer": (put(46, "<q", -(2**63)), "puts sequence 0 at byte -9223372036854775808"),
    "pointer before the file": (put(46, "<q", -2), "puts sequence 0 at byte -2"),
    "far pointer": (put(62, "<q", 2**63 - 1), "puts sequence 2 at byte 9223372036854775807"),
    "first document": (put(70, "<q", 1), "are sequences 1 to 3, but must be 0 to 3"),
    "last document": (put(86, "<q", 2), "are sequences 0 to 2, but must be 0 to 3"),
    "far documents": (put(78, "<q", 4), "document indices must rise"),
    "negative documents": (put(78, "<q", -1), "document indices must rise"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_index_is_told_before_anything_is_read_outside(tmp_path, what):
    path = write_megatron(tmp_path / "a", [[[1, 2], [3]], [[4, 5]]])
    unit = one_unit(path)
    change, message = DAMAGE[what]
    index = tmp_path / "a.idx"
    assert index.stat().st_size == 94
    index.write_bytes(change(index.read_bytes()))
    with pytest.raises(InputError, match=rf"a\.idx .*{message}"):
        next(read_megatron(unit))


def test_documents_that_fall_are_damage(tmp_path):
    path = write_megatron(tmp_path / "a", [[[1], [2]], [[3]], []])
    unit, index = one_unit(path), tmp_path / "a.idx"
    index.write_bytes(index.read_bytes()[:-32] + np.array([0, 3, 1, 3], "<i8").tobytes())
    with pytest.raises(InputError, match="document indices must rise from 0 to 3"):
        next(read_megatron(unit))


@pytest.mark.parametrize("size", [9, 0])
def test_a_bin_that_was_cut_is_told(tmp_path, size):
    path = write_megatron(tmp_path / "a", [[[1, 2], [3]], [[4, 5]]])
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(InputError, match=f"but its .bin has {size} bytes"):
        next(read_megatron(one_unit(path)))


def test_missing_files_and_fewer_documents_are_told(tmp_path):
    path = write_megatron(tmp_path / "a", [[[1]], [[2]]])
    unit = one_unit(path)
    write_megatron(tmp_path / "a", [[[1]]])
    with pytest.raises(InputError, match="has 1 document, fewer than the 2 it had"):
        next(read_megatron(unit))
    (tmp_path / "a.idx").unlink()
    with pytest.raises(InputError, match=r"a\.idx cannot be read: No such file"):
        next(read_megatron(unit))
