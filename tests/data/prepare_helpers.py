"""Inputs of every kind to prepare, and looks at what came out."""

import gzip
import json
import random
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from zaya_jax.config import ModelConfig
from zaya_jax.data.corpus import SPLITS
from zaya_jax.data.manifest import MANIFEST, FileEntry, describe_file
from zaya_jax.data.prepare import (
    TOKENIZER,
    PrepareSettings,
    open_manifest,
)
from zaya_jax.data.shards import open_documents
from zaya_jax.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parent.parent.parent
WORDS = "the model reads one token then writes another naïve ☃ expert while all wait".split()  # noqa: SIM905
QUARTER = PrepareSettings(heldout=0.25)
MODEL = ModelConfig(
    vocab_size=300, hidden_size=8, num_layers=1, num_query_heads=2, num_kv_heads=2, head_dim=4, num_experts=2,
    expert_size=8, router_size=4, max_positions=64,
)  # fmt: skip
CHAT = PrepareSettings("chat", "messages", heldout=0.25)


def make_texts(count, seed=0, longest=40):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, longest))) + f" {i}." for i in range(count)]


def write_lines(path, lines):
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in encoded))
    return path


def write_jsonl(path, texts, field="text"):
    return write_lines(path, [{"id": i, field: text} for i, text in enumerate(texts)])


def write_megatron(path, documents, dtype="int32"):
    """Token ids as Megatron-LM has them, each document one sequence."""
    sizes, code = [len(document) for document in documents], {"int32": 4, "int64": 5, "uint16": 8}[dtype]
    pointers = np.cumsum([0, *sizes[:-1]]) * np.dtype(dtype).itemsize
    path.with_suffix(".bin").write_bytes(b"".join(np.array(document, dtype).tobytes() for document in documents))
    path.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sizes), len(sizes) + 1)
        + np.array(sizes, "<i4").tobytes() + np.array(pointers, "<i8").tobytes()
        + np.arange(len(sizes) + 1, dtype="<i8").tobytes()
    )  # fmt: skip
    return path.with_suffix(".bin")


def write_input(folder, kind, texts):
    """The texts in a file or folder of some kind."""
    path = folder / "in"
    if kind == "jsonl.gz":
        plain = write_jsonl(folder / "plain.jsonl", texts)
        path = folder / "in.jsonl.gz"
        path.write_bytes(gzip.compress(plain.read_bytes()))
    elif kind == "jsonl.zst":
        plain = write_jsonl(folder / "plain.jsonl", texts)
        path = folder / "in.jsonl.zst"
        with pa.CompressedOutputStream(str(path), "zstd") as stream:
            stream.write(plain.read_bytes())
    elif kind == "parquet":
        path = folder / "in.parquet"
        pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), path, row_group_size=7)
    elif kind == "saved dataset":
        path.mkdir()
        schema, middle = pa.schema([("text", pa.string())]), len(texts) // 2
        names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
        for name, some in zip(names, (texts[:middle], texts[middle:]), strict=True):
            with pa.ipc.new_stream(str(path / name), schema) as writer:
                writer.write_batch(pa.record_batch([pa.array(some)], schema=schema))
        (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
        (path / "dataset_info.json").write_text("{}")
    elif kind == "texts":
        for i, text in enumerate(texts):
            (path / f"part{i // 10}").mkdir(parents=True, exist_ok=True)
            (path / f"part{i // 10}" / f"{i:03d}.txt").write_bytes(text.encode())
            (path / f"part{i // 10}" / f"{i:03d}.log").write_text("left out")
    return path


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_back(folder):
    """The texts of each split, after a look at what surrounds and counts them."""
    manifest, texts = open_manifest(folder), {}
    tokenizer = load_tokenizer(folder / TOKENIZER, manifest.eot)
    for split in SPLITS:
        entry, documents = manifest.split(split), open_documents(folder, manifest, split)
        found = [documents[i].tokens for i in range(len(documents))]
        for tokens in found:
            assert tokens[0] == tokens[-1] == tokenizer.eot
            assert len(tokens) > 2
            assert tokenizer.eot not in tokens[1:-1]
            assert tokens.dtype == np.dtype(manifest.dtype)
        texts[split] = [tokenizer.decode(tokens[1:-1].tolist()) for tokens in found]
        assert documents.lengths.dtype == np.int64
        assert documents.lengths.tolist() == [len(tokens) for tokens in found]
        assert entry.documents == len(found) == sum(shard.documents for shard in entry.shards)
        assert entry.tokens == sum(len(tokens) for tokens in found)
        assert entry.text_bytes == sum(len(text.encode()) for text in texts[split])
    return texts


def check_same(texts, found):
    """Each split holds its texts in the order given, and equal ones are in one split."""
    assert not set(found["train"]) & set(found["heldout"])
    assert Counter(texts) == Counter(found["train"]) + Counter(found["heldout"])
    for split in SPLITS:
        side = set(found[split])
        assert found[split] == [text for text in texts if text in side]


def check_nothing_else(folder):
    """A finished folder holds what its manifest names, and the manifest."""
    manifest = open_manifest(folder)
    assert {path.name for path in folder.iterdir()} == {MANIFEST, *(entry.file for entry in manifest.files())}
    for entry in manifest.files():
        assert describe_file(folder / entry.file) == FileEntry(entry.file, entry.bytes, entry.digest)


def count_notes(folder):
    return len(list(folder.glob("unit-*.json")))
