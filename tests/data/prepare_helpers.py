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

from zaya_jax.data.prepare.manifest import MANIFEST, SPLITS, FileEntry, describe_file
from zaya_jax.data.prepare.preparation import TOKENIZER, PrepareSettings, open_manifest
from zaya_jax.data.prepare.shards import open_documents
from zaya_jax.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parent.parent.parent
WORDS = "the model reads one token then writes another naïve ☃ expert while all wait".split()  # noqa: SIM905
QUARTER = PrepareSettings(heldout=0.25)
CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}
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


def write_megatron(path, documents, dtype="uint16"):
    """Documents, each a list of sequences of token ids, as Megatron-LM has them in PATH.bin and PATH.idx."""
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


def write_arrow(path, batches, *, stream=True, column="text", kind=None, compression=None):
    """Batches of texts as an IPC stream, as `datasets` writes, or as an IPC file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = [pa.array(batch, kind or pa.string()) for batch in batches]
    schema = pa.schema([("id", pa.int64()), (column, kind or pa.string())])
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(str(path), schema, options=options) as writer:
        for array in arrays:
            writer.write_batch(pa.record_batch([pa.array(range(len(array)), pa.int64()), array], schema=schema))
    return path


def write_saved(folder, shards):
    """A folder as `save_to_disk` writes it; `shards` are lists of batches of texts."""
    names = [f"data-{i:05d}-of-{len(shards):05d}.arrow" for i in range(len(shards))]
    for name, batches in zip(names, shards, strict=True):
        write_arrow(folder / name, batches)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return folder


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
        write_saved(path, [[texts[: len(texts) // 2]], [texts[len(texts) // 2 :]]])
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
        written = [documents[i].tokens for i in range(len(documents))]
        for tokens in written:
            assert tokens[0] == tokens[-1] == tokenizer.eot
            assert len(tokens) > 2
            assert tokenizer.eot not in tokens[1:-1]
            assert tokens.dtype == np.dtype(manifest.dtype)
        texts[split] = [tokenizer.decode(tokens[1:-1].tolist()) for tokens in written]
        assert documents.lengths.dtype == np.int64
        assert documents.lengths.tolist() == [len(tokens) for tokens in written]
        assert entry.documents == len(written) == sum(shard.documents for shard in entry.shards)
        assert entry.tokens == sum(len(tokens) for tokens in written)
        assert entry.text_bytes == sum(len(text.encode()) for text in texts[split])
    return texts


def check_same(texts, splits):
    """Each split holds its texts in their order, and equal texts are in one split."""
    assert not set(splits["train"]) & set(splits["heldout"])
    assert Counter(texts) == Counter(splits["train"]) + Counter(splits["heldout"])
    for written in splits.values():
        assert written == [text for text in texts if text in set(written)]


def check_nothing_else(folder):
    """A finished folder holds what its manifest names, and the manifest."""
    manifest = open_manifest(folder)
    assert {path.name for path in folder.iterdir()} == {MANIFEST, *(entry.file for entry in manifest.files())}
    for entry in manifest.files():
        assert describe_file(folder / entry.file) == FileEntry(entry.file, entry.bytes, entry.digest)


def count_notes(folder):
    return len(list(folder.glob("unit-*.json")))
