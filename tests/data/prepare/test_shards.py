import functools
import pickle
import random
import re
import resource
from concurrent.futures import ThreadPoolExecutor

import chex
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordReader
from hypothesis import given, settings
from hypothesis import strategies as st

from zaya_jax.data.prepare.manifest import FORMAT, FileEntry, Manifest, SplitEntry, describe_file
from zaya_jax.data.prepare.shards import Documents, Records, ShardWriter, Text, open_documents, pack_text, token_dtype
from zaya_jax.errors import InputError


def write_shards(folder, records, per_shard):
    """Entries of shards of `per_shard` records each."""
    entries = []
    for start in range(0, len(records), per_shard):
        with ShardWriter(folder / f"train-{len(entries):06d}.arrayrecord") as writer:
            for record in records[start : start + per_shard]:
                writer.write(record)
            entries.append(writer.finish())
    return tuple(entries)


def open_records(folder, records, lengths, *, masked=False, dtype="<u2", per_shard=4) -> Documents:
    """Write the records of one split, and open them by a manifest."""
    shards = write_shards(folder, records, per_shard)
    np.save(folder / "train-lengths.npy", np.array(lengths, np.int64))
    entry = SplitEntry(shards, describe_file(folder / "train-lengths.npy"), len(lengths), sum(lengths), 0)
    unused = FileEntry("", 0, "")
    kind = "masked" if masked else "tokens"
    manifest = Manifest(FORMAT, kind, "", "", dtype, unused, "", entry, entry, counts={}, examples=())
    return open_documents(folder, manifest, "train")


@st.composite
def masked_documents(draw, dtype):
    """Tokens and what the loss counts of them, for a few documents; some are empty."""
    most = np.iinfo(dtype).max
    lengths = draw(st.lists(st.sampled_from([0, 0, 1, 2, 7, 8, 9, 30]), min_size=1, max_size=10))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    return [
        Text(rng.integers(0, most, length, endpoint=True).astype(dtype), rng.random(length) < rng.random())
        for length in lengths
    ]


# --- documents -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", ["|u1", "<u2", "<u4"])
@given(data=st.data(), per_shard=st.sampled_from([1, 3, 100]))
def test_documents_come_back(tmp_path_factory, masked, dtype, data, per_shard):
    texts = data.draw(masked_documents(np.dtype(dtype)))
    records = [pack_text(*text) if masked else text.tokens.tobytes() for text in texts]
    lengths, folder = [len(text.tokens) for text in texts], tmp_path_factory.mktemp("shards")
    read = open_records(folder, records, lengths, masked=masked, dtype=dtype, per_shard=per_shard)
    assert read.lengths.tolist() == lengths
    for index, text in enumerate(texts):
        tokens, loss_mask = read[index]
        chex.assert_trees_all_equal((tokens, loss_mask), (text.tokens, text.loss_mask if masked else None))
        chex.assert_type(tokens, dtype)
        assert not tokens.flags.writeable


def test_tokens_lie_little_endian_and_then_a_bit_each():
    tokens = np.array([1, 258, 3, 4, 5, 6, 7, 8, 9], "<u2")
    counts = np.array([True, False, False, False, False, False, False, True, True])
    assert pack_text(tokens, counts) == tokens.astype("<u2").tobytes() + bytes([0b10000001, 0b10000000])


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(256, "|u1"), (257, "<u2"), (65536, "<u2"), (65537, "<u4"), (262272, "<u4")]
)
def test_the_type_of_a_token_is_the_smallest(vocab_size, dtype):
    assert token_dtype(vocab_size).str == dtype


@pytest.mark.parametrize("masked", [False, True])
def test_reading_from_threads_and_after_pickling(tmp_path, masked):
    documents = [np.full(i % 7, i % 250 + 1, "<u2") for i in range(300)]
    counts = [np.arange(len(tokens)) % 2 == i % 2 for i, tokens in enumerate(documents)]
    records = [pack_text(*pair) if masked else pair[0].tobytes() for pair in zip(documents, counts, strict=True)]
    opened = open_records(tmp_path, records, list(map(len, documents)), masked=masked, per_shard=40)
    opened[3]
    read = pickle.loads(pickle.dumps(opened))  # noqa: S301
    indices = np.random.default_rng(0).integers(0, 300, 2000)
    with ThreadPoolExecutor(4) as threads:
        for index, text in zip(indices, threads.map(read.__getitem__, indices), strict=True):
            assert text.tokens.tolist() == documents[index].tolist()
            assert not masked or text.loss_mask.tolist() == counts[index].tolist()


@pytest.mark.parametrize("index", [-1, 5])
def test_an_index_outside_is_an_error(tmp_path, index):
    read = open_records(tmp_path, [bytes(2)] * 5, [1] * 5)
    with pytest.raises(IndexError, match=f"Document {index} is not among the 5 documents"):
        read[index]


def test_a_split_without_documents_is_empty(tmp_path):
    read = open_records(tmp_path, [], [])
    assert len(read) == 0
    assert len(pickle.loads(pickle.dumps(read))) == 0  # noqa: S301
    with pytest.raises(IndexError):
        read[0]


# --- what is damaged -------------------------------------------------------------------------------------------


def sample_texts(masked):
    """Documents of several sizes, some larger than a page, some that compress well and some that do not."""
    rng = np.random.default_rng(5)
    lengths = [5, 0, 3000, 1, 60, 4000, 17, 8]
    texts = [rng.integers(0, 300 if i % 2 else 3, length).astype("<u2") for i, length in enumerate(lengths)]
    return [Text(tokens, rng.random(len(tokens)) < 0.5 if masked else None) for tokens in texts]


@functools.cache
def packed_records(masked):
    texts = sample_texts(masked)
    return texts, [pack_text(t.tokens, t.loss_mask) if masked else t.tokens.tobytes() for t in texts]


def attempt(function):
    """What a function returns, or the sentence with which it refuses."""
    try:
        return function()
    except InputError as error:
        return str(error)


def assert_same_or_refused(read, texts, shards):
    """Every document is read as it was written, or refused with the name of its shard; the number of the latter."""
    refused = 0
    for index, text in enumerate(texts):
        result = attempt(functools.partial(read.__getitem__, index))
        if isinstance(result, str):
            assert f"Document {index} in the data file {shards[index]} is damaged" in result
            refused += 1
        else:
            chex.assert_trees_all_equal(result, text)
    return refused


@pytest.mark.parametrize("masked", [False, True])
@settings(max_examples=30, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), size=st.sampled_from([1, 1, 1, 8, 500]), seed=st.integers(0, 2**31),
       anywhere=st.booleans(), again=st.booleans())  # fmt: skip
def test_a_damaged_document_is_read_as_written_or_refused(tmp_path_factory, masked, place, size, seed, anywhere, again):
    folder, rng = tmp_path_factory.mktemp("shards"), random.Random(seed)
    texts, records = packed_records(masked)
    read = open_records(folder, records, [len(text.tokens) for text in texts], masked=masked)
    shard = sorted(folder.glob("*.arrayrecord"))[rng.randrange(2)]
    content = bytearray(shard.read_bytes())
    # Most of a small shard is padding.
    places = range(len(content)) if anywhere else np.flatnonzero(np.frombuffer(content, np.uint8)).tolist()
    start = places[int(place * len(places))]
    for index in range(start, min(start + size, len(content))):
        content[index] ^= rng.randrange(1, 256)
    with shard.open("r+b") as file:  # the same file, whoever has it open
        file.write(content)
    if again:
        pickled = pickle.dumps(read)
        read = attempt(lambda: pickle.loads(pickled))  # noqa: S301 (as in a worker process, which opens it anew)
        if isinstance(read, str):
            assert str(shard) in read
            return
    shards = [folder / f"train-{index // 4:06d}.arrayrecord" for index in range(len(texts))]
    assert_same_or_refused(read, texts, shards)


def test_a_document_whose_content_was_flipped_is_refused(tmp_path):
    texts, records = packed_records(False)
    read = open_records(tmp_path, records, [len(text.tokens) for text in texts])
    shard = tmp_path / "train-000000.arrayrecord"
    content = bytearray(shard.read_bytes())
    places = np.flatnonzero(np.frombuffer(content, np.uint8))
    content[places[len(places) // 2]] ^= 1  # in the large document
    shard.write_bytes(content)
    shards = [tmp_path / f"train-{index // 4:06d}.arrayrecord" for index in range(len(texts))]
    assert assert_same_or_refused(read, texts, shards) == 1


@pytest.mark.parametrize(("masked", "size"), [(False, 0), (False, 3), (False, 5), (True, 4), (True, 6)])
def test_a_record_of_another_length_is_refused(tmp_path, masked, size):
    right, wrong = bytes(5 if masked else 4), bytes(size)
    read = open_records(tmp_path, [right, wrong], [2, 2], masked=masked, per_shard=1)
    read[0]
    match = re.escape(f"Document 1 in the data file {tmp_path / 'train-000001.arrayrecord'} is damaged")
    with pytest.raises(InputError, match=match):
        read[1]


def test_a_shard_that_cannot_be_opened_is_not_called_damaged(tmp_path):
    read = open_records(tmp_path, [bytes(4), bytes(4)], [2, 2], per_shard=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(InputError, match=r"train-000001\.arrayrecord cannot be read: Too many open files"):
            read[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- shards ----------------------------------------------------------------------------------------------------


def test_a_shard_appears_when_it_is_finished(tmp_path):
    path = tmp_path / "a.arrayrecord"
    with ShardWriter(path) as writer:
        for index in range(5):
            writer.write(bytes([index]) * index)
            assert not path.exists()
        entry = writer.finish()
        assert path.exists()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    expected = describe_file(path)
    assert (entry.file, entry.bytes, entry.digest, entry.documents) == (path.name, expected.bytes, expected.digest, 5)
    records = Records(tmp_path, (entry,))
    assert [records[index] for index in range(len(records))] == [bytes([index]) * index for index in range(5)]


def test_every_record_is_a_chunk_of_its_own(tmp_path):
    with ShardWriter(tmp_path / "a") as writer:
        writer.write(b"some")
        writer.finish()
    reader = ArrayRecordReader(str(tmp_path / "a"))
    assert "group_size:1," in reader.writer_options_string()
    reader.close()


@pytest.mark.parametrize("records", [0, 1, 5])
def test_a_shard_that_is_not_finished_leaves_no_file(tmp_path, records):
    with ShardWriter(tmp_path / "a.arrayrecord") as writer:
        for _ in range(records):
            writer.write(b"some")
    assert list(tmp_path.iterdir()) == []


def test_a_failure_while_finishing_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: 1 / 0)
    with ShardWriter(tmp_path / "a.arrayrecord") as writer:
        writer.write(b"some")
        with pytest.raises(ZeroDivisionError):
            writer.finish()
    assert list(tmp_path.iterdir()) == []


def test_an_older_shard_of_the_name_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.arrayrecord"
    path.write_bytes(b"old")
    with ShardWriter(path) as writer:
        writer.write(b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    with ShardWriter(path) as writer:
        writer.write(b"new")
        entry = writer.finish()
    assert Records(tmp_path, (entry,))[0] == b"new"
