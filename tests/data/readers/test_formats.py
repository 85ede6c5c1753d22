import gzip
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

from zaya_jax.data.readers.documents import Document, FirstLine, Format, cut_evenly
from zaya_jax.data.readers.inputs import FORMATS, list_units

JSONL = b'{"text": "one"}\n{"text": "\\u2603 two"}\n{"text": "three\\r\\nlines"}\n'


def test_plain_files_are_read_without_pyarrow_and_nothing_needs_jax(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(JSONL)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(JSONL))
    (tmp_path / "c.txt").write_text("text")
    program = (
        "import sys; from zaya_jax.data.readers.inputs import list_units;"
        "from zaya_jax.data.readers.inputs import read_unit;"
        "print(sum(1 for u in list_units(sys.argv[1:]) for _ in read_unit(u, field='text')));"
        "print(sorted({'jax', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["7", "[]"]


def test_a_new_format_is_a_module_and_a_line_of_the_table(tmp_path, monkeypatch, read_all):
    def read(unit, field):
        for number in range(unit.start, unit.stop):
            yield Document(f"{field} {number}", unit.files[0], 1, number - unit.start, FirstLine(unit.start + 1))

    new = SimpleNamespace(FORMAT=Format(partial(cut_evenly, lambda path: 3), read))
    monkeypatch.setitem(sys.modules, "zaya_jax.data.readers.new", new)
    monkeypatch.setitem(FORMATS, "new", (".new",))
    (tmp_path / "a.new").write_text("12345")
    units = list_units([tmp_path], unit_bytes=3)
    assert [(unit.format, unit.start, unit.stop) for unit in units] == [("new", 0, 1), ("new", 1, 3)]
    assert read_all(units, "row") == ([(1, "row 0"), (2, "row 1"), (3, "row 2")], [])
