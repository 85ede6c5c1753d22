"""Files in which a few bytes stand for gigabytes: the documents are read, one after the other, in little memory."""

import bz2
import gzip
import json
import struct
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.prepare_helpers import ROOT
from zaya_jax.data.readers.inputs import list_units

MEBI = 2**20
TEXT = "word " * (2 * MEBI)  # 10 MiB
COUNT = 64
MOST = 400 * MEBI  # bytes that a process holds at any time, with Python and libraries; the texts have 640 MiB
READ = r"""
import json, re, sys
from pathlib import Path
from zaya_jax.data.readers.inputs import read_unit
from zaya_jax.data.readers.inputs import list_units
read = []
for unit in list_units([sys.argv[1]]):
    for entry in read_unit(unit, field=sys.argv[2]):
        read.append(getattr(entry, "reason", None) or [len(str(entry.value)), str(entry.value)[-9:]])
        del entry
print(json.dumps([read, 1024 * int(re.search('VmHWM:\s*(\d+)', Path('/proc/self/status').read_text())[1])]))
"""


def write_parquet(folder, **options):
    pq.write_table(pa.table({"text": [TEXT] * COUNT}), folder / "in.parquet", compression="zstd", **options)


def write_dictionary_parquet(folder):
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * COUNT, pa.int32()), [TEXT])
    pq.write_table(pa.table({"text": texts}), folder / "in.parquet", compression="zstd")


def write_delta_parquet(folder):
    write_parquet(folder, use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"})


def write_arrow(folder):
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * COUNT, pa.int32()), [TEXT])
    batch = pa.record_batch([texts], ["text"])
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(str(folder / "in.arrow"), batch.schema, options=options) as writer:
        writer.write_batch(batch)


def write_gz(folder):
    line = json.dumps({"text": TEXT}).encode() + b"\n"
    # Members of a file, each compressed once.
    (folder / "in.jsonl.gz").write_bytes(gzip.compress(line) * COUNT)


def read(path, field="text"):
    done = subprocess.run(
        [sys.executable, "-c", READ, path, field], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("write", [write_dictionary_parquet, pytest.param(write_arrow, marks=pytest.mark.soak),
                                   pytest.param(write_delta_parquet, marks=pytest.mark.soak),
                                   pytest.param(write_gz, marks=pytest.mark.soak)])  # fmt: skip
def test_all_documents_of_a_bomb_are_read_in_little_memory(tmp_path, write):
    write(tmp_path)
    [path] = tmp_path.iterdir()
    assert path.stat().st_size < len(TEXT) // 2
    read_back, peak = read(path)
    assert read_back == [[len(TEXT), TEXT[-9:]]] * COUNT
    assert peak < MOST


@pytest.mark.soak
def test_conversations_of_a_bomb_are_read_in_little_memory(tmp_path):
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": TEXT}]
    pq.write_table(pa.table({"messages": [messages] * COUNT}), tmp_path / "in.parquet", compression="zstd")
    read_back, peak = read(tmp_path / "in.parquet", "messages")
    assert read_back == [[len(str(messages)), str(messages)[-9:]]] * COUNT
    assert peak < MOST


@pytest.mark.parametrize("store_schema", [False, True])
def test_only_a_conversation_that_stands_for_too_much_is_bad(tmp_path, store_schema):
    """The first of many has most of the messages, which an average does not show."""
    first, rest = 1200, 500
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * (first + rest), pa.int32()), ["word " * (MEBI // 5)])
    said = pa.StructArray.from_arrays([texts], ["content"])
    column = pa.ListArray.from_arrays(pa.array([0, *range(first, first + rest + 1)], pa.int32()), said)
    pq.write_table(pa.table({"messages": column}), tmp_path / "in.parquet", store_schema=store_schema)
    read_back, peak = read(tmp_path / "in.parquet", "messages")
    assert read_back[0] == "too large"
    assert [text for _, text in read_back[1:]] == [" word '}]"] * rest
    assert peak < MOST


def test_a_few_bytes_of_bz2_are_decompressed_part_by_part(tmp_path):
    compressor, blank = bz2.BZ2Compressor(), b" " * (10 * MEBI) + b"\n"
    parts = [compressor.compress(part) for part in (*[blank] * 48, b'{"text": "a"}\n')]
    (tmp_path / "in.jsonl.bz2").write_bytes(b"".join(parts) + compressor.flush())
    read_back, peak = read(tmp_path / "in.jsonl.bz2")
    assert read_back == [[1, "a"]]
    assert peak < MOST


def test_a_file_of_very_many_blank_lines_is_listed_at_once(tmp_path):
    compressor = bz2.BZ2Compressor()
    parts = [compressor.compress(b"\n" * (16 * MEBI)) for _ in range(8)]
    (tmp_path / "in.jsonl.bz2").write_bytes(b"".join(parts) + compressor.flush())
    start = time.process_time()
    assert len(list_units([tmp_path / "in.jsonl.bz2"])) == 1
    assert time.process_time() - start < 5  # 100 s line by line


@pytest.mark.soak
def test_the_rest_of_a_line_that_is_too_long_is_passed_over(tmp_path):
    blanks = gzip.compress(b" " * (64 * MEBI))
    ends = [gzip.compress(line) for line in (b'{"text": "a"}\n{"text": "', b'"}\n{"text": "b"}\n')]
    (tmp_path / "in.jsonl.gz").write_bytes(ends[0] + blanks * 16 + ends[1])
    read_back, peak = read(tmp_path / "in.jsonl.gz")
    assert read_back == [[1, "a"], "too large", [1, "b"]]
    assert peak < 3 * MOST  # a line of 128 MiB is kept, and joined from its parts


def test_a_megatron_index_that_lists_one_sequence_many_times_makes_a_bad_document(tmp_path):
    count, tokens = 10_000, 2**20
    np.zeros(tokens, "<u2").tofile(tmp_path / "in.bin")
    (tmp_path / "in.idx").write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, count + 1, 3) + np.full(count + 1, tokens, "<i4").tobytes()
        + np.zeros(count + 1, "<i8").tobytes() + np.array([0, count, count + 1], "<i8").tobytes())  # fmt: skip
    read_back, peak = read(tmp_path / "in.bin")
    assert [entry if entry == "too large" else "read" for entry in read_back] == ["too large", "read"]
    assert peak < MOST
