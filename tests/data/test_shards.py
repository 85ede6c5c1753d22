import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordReader
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.data.manifest import FORMAT, FileEntry, Manifest, SplitEntry
from zaya_jax.data.shards import Documents, open_documents, token_dtype, write_split


def open_split(folder, entry: SplitEntry, dtype) -> Documents:
    unused = FileEntry("", 0, "")
    return open_documents(folder, Manifest(FORMAT, "", dtype.str, unused, unused, entry, entry), "train")


@given(
    documents=st.lists(st.lists(st.integers(1, 299), max_size=30), min_size=1, max_size=12),
    shard_bytes=st.sampled_from([1, 50, 1000]),
)
def test_documents_come_back(tmp_path_factory, documents, shard_bytes):
    folder = tmp_path_factory.mktemp("shards")
    dtype = token_dtype(300)
    entry = write_split(folder, "train", iter(documents), dtype=dtype, text_bytes=7, shard_bytes=shard_bytes)
    read = open_split(folder, entry, dtype)
    assert [read[i].tolist() for i in range(len(read))] == [[0, *document, 0] for document in documents]
    assert read.lengths.tolist() == [len(document) + 2 for document in documents]
    assert entry.documents == len(documents) == sum(shard.documents for shard in entry.shards)
    assert entry.tokens == sum(read.lengths)
    assert entry.text_bytes == 7
    assert len(entry.shards) == (len(documents) if shard_bytes == 1 else len({s.file for s in entry.shards}))
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [entry.lengths.file, *(shard.file for shard in entry.shards)]
    )


def test_shards_are_little_endian_records_of_their_own(tmp_path):
    write_split(tmp_path, "heldout", [[258, 1], [2]], dtype=token_dtype(300), text_bytes=3)
    reader = ArrayRecordReader(str(tmp_path / "heldout-00000.arrayrecord"))
    assert reader.read_all() == [bytes([0, 0, 2, 1, 1, 0, 0, 0]), bytes([0, 0, 2, 0, 0, 0])]
    assert "group_size:1," in reader.writer_options_string()
    reader.close()


def test_a_full_shard_is_followed_by_a_new_one(tmp_path):
    entry = write_split(tmp_path, "train", [[1] * 8] * 5, dtype=token_dtype(300), text_bytes=0, shard_bytes=40)
    assert [shard.documents for shard in entry.shards] == [2, 2, 1]


def test_the_same_documents_give_the_same_bytes(tmp_path):
    entries = []
    for name in "ab":
        (tmp_path / name).mkdir()
        entries.append(write_split(tmp_path / name, "train", [[1, 2]] * 9, dtype=token_dtype(300), text_bytes=0))
    assert entries[0] == entries[1]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(257, "<u2"), (65536, "<u2"), (65537, "<u4"), (262272, "<u4")])
def test_the_type_of_a_token_is_the_smallest(vocab_size, dtype):
    assert token_dtype(vocab_size).str == dtype


def test_reading_from_threads_and_after_pickling(tmp_path):
    documents = [[i % 250 + 1] * (i % 7) for i in range(300)]
    dtype = token_dtype(300)
    entry = write_split(tmp_path, "train", documents, dtype=dtype, text_bytes=0, shard_bytes=500)
    read = pickle.loads(pickle.dumps(open_split(tmp_path, entry, dtype)))  # noqa: S301
    indices = np.random.default_rng(0).integers(0, 300, 2000)
    with ThreadPoolExecutor(4) as threads:
        for index, document in zip(indices, threads.map(read.__getitem__, indices), strict=True):
            assert document.tolist() == [0, *documents[index], 0]


def test_jax_stays_unimported():
    code = "import sys, zaya_jax.data.shards, zaya_jax.data.pipeline; assert not {'jax', 'grain'} & set(sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
