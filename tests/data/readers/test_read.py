import gzip
import subprocess
import sys

JSONL = b'{"text": "one"}\n{"text": "\\u2603 two"}\n{"text": "three\\r\\nlines"}\n'


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
