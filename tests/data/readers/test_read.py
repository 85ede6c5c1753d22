import gzip
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq

from zaya_jax.data.readers.inputs import list_units
from zaya_jax.data.readers.read import read_unit

TEXTS = ["one", "☃ two", "three\r\nlines"]
JSONL = b'{"text": "one"}\n{"text": "\\u2603 two"}\n{"text": "three\\r\\nlines"}\n'


def test_every_format_gives_the_same_documents(tmp_path, zstd, write_arrow, write_saved, write_megatron, read_all):
    (tmp_path / "a.jsonl").write_bytes(JSONL)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(JSONL))
    (tmp_path / "c.ndjson.zst").write_bytes(zstd(JSONL))
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "d.parquet")
    write_arrow(tmp_path / "e.arrow", [TEXTS[:1], TEXTS[1:]])
    write_saved(tmp_path / "f", [[TEXTS]])
    units = list_units([tmp_path])
    assert [unit.format for unit in units] == ["jsonl"] * 3 + ["parquet"] + ["arrow"] * 2
    assert read_all(units) == (list(enumerate(TEXTS, 1)) * 6, [])
    (tmp_path / "g").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "g" / f"{i}.txt").write_bytes(text.encode())
    write_megatron(tmp_path / "h", [[list(text.encode())] for text in TEXTS], "uint8")
    units = list_units([tmp_path / "g", tmp_path / "h"], unit_bytes=2**20)
    assert [unit.format for unit in units] == ["text", "megatron"]
    items = [item for unit in units for item in read_unit(unit, field="text")]
    assert [item.value for item in items[:3]] == TEXTS
    assert [bytes(item.value) for item in items[3:]] == [text.encode() for text in TEXTS]


def test_plain_files_are_read_without_pyarrow_and_nothing_needs_jax(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(JSONL)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(JSONL))
    (tmp_path / "c.txt").write_text("text")
    program = (
        "import sys; from zaya_jax.data.readers.inputs import list_units;"
        "from zaya_jax.data.readers.read import read_unit;"
        "print(sum(1 for u in list_units(sys.argv[1:]) for _ in read_unit(u, field='text')));"
        "print(sorted({'jax', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["7", "[]"]
