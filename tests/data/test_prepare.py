import gzip
import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from zaya_jax.config import Config, DataConfig, ModelConfig, PhaseConfig, SourceConfig
from zaya_jax.config.table import Table
from zaya_jax.data.convert import read_note
from zaya_jax.data.corpus import SPLITS
from zaya_jax.data.manifest import MANIFEST, FileEntry, describe_file
from zaya_jax.data.prepare import (
    TOKENIZER,
    PrepareSettings,
    merge,
    missing_tasks,
    open_manifest,
    prepare,
    remedy,
    summary,
)
from zaya_jax.data.readers.inputs import list_units
from zaya_jax.data.shards import Records, open_documents
from zaya_jax.data.sources import open_sources
from zaya_jax.data.tokenizer import load_tokenizer, train_tokenizer
from zaya_jax.data.verify import verify_files
from zaya_jax.errors import InputError

ROOT = Path(__file__).parent.parent.parent
WORDS = "the model reads one token then writes another naïve ☃ expert while all wait".split()  # noqa: SIM905
QUARTER = PrepareSettings(heldout=0.25)
MODEL = ModelConfig(
    vocab_size=300, hidden_size=8, num_layers=1, num_query_heads=2, num_kv_heads=2, head_dim=4, num_experts=2,
    expert_size=8, router_size=4, max_positions=64,
)  # fmt: skip
CHAT = PrepareSettings("chat", "messages", heldout=0.25)

# The command with small units: prepare INPUT TOKENIZER OUTPUT UNIT_BYTES WORKERS.
DRIVER = """
import sys
from pathlib import Path
from zaya_jax.data.prepare import PrepareSettings, prepare
if __name__ == "__main__":
    given, tokenizer, output, unit_bytes, workers = sys.argv[1:]
    prepare([given], Path(tokenizer), Path(output), PrepareSettings(heldout=0.25), unit_bytes=int(unit_bytes),
            workers=int(workers))
"""

# Kills a process at each of the moments at which it is about to open, rename or remove a file of its folder, and runs
# the same again. Prints the moments after which the folder is not what it should be, and then how many there are.
SWEEP = """
import json, os, random, shutil, signal, sys
from pathlib import Path
from zaya_jax.data.prepare import PrepareSettings, merge, prepare

given, tokenizer, good, output = map(Path, sys.argv[1:5])
unit_bytes, tasks, part = int(sys.argv[5]), int(sys.argv[6]), float(sys.argv[7])

def work():
    for task in range(tasks):
        prepare([str(given)], tokenizer, output, PrepareSettings(heldout=0.25), unit_bytes=unit_bytes, workers=1,
                task=task, tasks=tasks)
    merge(output)

def run(moment):
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    seen = 0

    def hook(event, arguments):
        nonlocal seen
        if event in ("open", "os.rename", "os.remove", "os.mkdir") and str(arguments[0]).startswith(str(output)):
            seen += 1
            if seen == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    work()
    json.dump(seen, open(output.with_name("seen"), "w"))
    os._exit(0)

def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}

run(0)
total, wrong, expected = json.load(open(output.with_name("seen"))), [], contents(good)
assert contents(output) == expected
every = range(1, total + 1)
moments = {*random.Random(0).sample(every, int(part * total)), *random.Random(1).sample(every[-16:], int(part * 16))}
for moment in sorted(moments):
    shutil.rmtree(output)
    status = run(moment)
    assert os.WTERMSIG(status) == signal.SIGKILL, (moment, status)
    output.mkdir(exist_ok=True)
    status = run(0)
    assert status == 0, (moment, status)
    if contents(output) != expected:
        wrong.append((moment, sorted(set(contents(output)) ^ set(expected))))
print(json.dumps({"wrong": wrong, "moments": len(moments)}))
"""


# --- what goes in ----------------------------------------------------------------------------------------------


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
    sizes = [len(document) for document in documents]
    pointers = np.cumsum([0, *sizes[:-1]]) * np.dtype(dtype).itemsize
    path.with_suffix(".bin").write_bytes(b"".join(np.array(document, dtype).tobytes() for document in documents))
    path.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, {"int32": 4}[dtype], len(sizes), len(sizes) + 1)
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


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The file of a tokenizer of 300 tokens."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(make_texts(100), 300).save(path)
    return path


@pytest.fixture
def given_texts(tmp_path):
    """A JSONL file of 40 texts, about 5 kB."""
    return write_jsonl(tmp_path / "in.jsonl", make_texts(40))


# --- what comes out --------------------------------------------------------------------------------------------


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


documents = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: text and not text.isspace()),
        st.sampled_from(["a", "one\ntwo\r\n", "<|endoftext|>", "a <|endoftext|> b", "☃" * 300, "\x00", "\ufeffx"]),
    ),
    min_size=1,
    max_size=25,
)


@given(texts=documents, unit_bytes=st.integers(40, 4000), escaped=st.booleans())
def test_every_document_comes_back(tmp_path_factory, tokenizer, texts, unit_bytes, escaped):
    folder = tmp_path_factory.mktemp("texts")
    lines = [json.dumps({"text": text}, ensure_ascii=escaped).encode() for text in texts]
    path = write_lines(folder / "in.jsonl", lines)
    manifest = prepare([str(path)], tokenizer, folder / "out", QUARTER, unit_bytes=unit_bytes, workers=1)
    assert manifest == open_manifest(folder / "out")
    check_same(texts, read_back(folder / "out"))
    check_nothing_else(folder / "out")
    assert manifest.counts == {}
    assert manifest.kind == "tokens"


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "parquet", "saved dataset", "texts"])
def test_every_kind_of_input_gives_its_documents(tmp_path, tokenizer, kind):
    texts = make_texts(30)
    path = write_input(tmp_path, kind, texts)
    prepare([str(path)], tokenizer, tmp_path / "out", QUARTER, unit_bytes=500, workers=1)
    found = read_back(tmp_path / "out")
    check_same(texts, found)
    plain = write_jsonl(tmp_path / "other.jsonl", texts)
    prepare([str(plain)], tokenizer, tmp_path / "plain", QUARTER, workers=1)
    assert read_back(tmp_path / "plain") == found  # held out are the same, whatever they were read from


def test_several_inputs_follow_one_another(tmp_path, tokenizer):
    texts = make_texts(40)
    first = write_jsonl(tmp_path / "z.jsonl", texts[:10])
    second = write_input(tmp_path, "parquet", texts[10:30])
    third = write_jsonl(tmp_path / "a.jsonl", texts[30:])
    inputs = [str(first), str(second), str(third)]
    prepare(inputs, tokenizer, tmp_path / "out", QUARTER, unit_bytes=300, workers=1)
    check_same(texts, read_back(tmp_path / "out"))


def test_another_field_and_other_endings_are_read_where_they_are_named(tmp_path, tokenizer):
    texts = make_texts(20)
    path = write_jsonl(tmp_path / "in.jsonl", texts, field="body")
    prepare([str(path)], tokenizer, tmp_path / "out", PrepareSettings(field="body", heldout=0.25), workers=1)
    check_same(texts, read_back(tmp_path / "out"))
    folder = write_input(tmp_path, "texts", texts)
    prepare([str(folder)], tokenizer, tmp_path / "logs", PrepareSettings(suffixes=(".log",), heldout=0), workers=1)
    assert read_back(tmp_path / "logs") == {"train": ["left out"] * 20, "heldout": []}


def test_documents_of_megatron_end_once_and_fit_the_vocabulary(tmp_path, tokenizer):
    loaded = load_tokenizer(tokenizer)
    texts = make_texts(6)
    ids = [loaded.encode(text) for text in texts]
    ids[1] += [loaded.eot]
    bad = [[5, loaded.vocab_size, 5], [5, -1], [loaded.eot], [], [5, loaded.eot, 5]]
    path = write_megatron(tmp_path / "in", [*ids[:3], *bad[:2], *ids[3:], *bad[2:]])
    with pytest.raises(InputError, match=rf"^1 document .*\n  {path}:4: wrong tokens: .* below {loaded.vocab_size}"):
        prepare([str(path)], tokenizer, tmp_path / "out", QUARTER, workers=1)
    manifest = prepare([str(path)], tokenizer, tmp_path / "out", QUARTER, workers=1, max_bad=5)
    check_same(texts, read_back(tmp_path / "out"))
    assert manifest.counts == {"wrong tokens": 3, "empty": 1, "end inside": 1}
    lines = [int(example.removeprefix(f"{path}:").partition(":")[0]) for example in manifest.examples]
    assert lines == [4, 5, 9, 10, 11]


def test_conversations_are_kept_with_their_roles(tmp_path, tokenizer):
    loaded = load_tokenizer(tokenizer)
    said = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{text}?"},
             {"role": "assistant", "content": text, "reasoning": "ä ☃"}] for text in make_texts(20)]  # fmt: skip
    thinking = {"role": "assistant", "content": "<think>hm</think>yes"}
    forged = [{"role": "user", "content": "a <|endoftext|>"}, {"role": "assistant", "content": "b"}]
    lines = [*said[:5], [said[0][0]], *said[5:], forged, [thinking], "text", [{"role": "cat", "content": "miaow"}]]
    path = write_lines(tmp_path / "in.jsonl", [{"messages": line} for line in lines])
    with pytest.raises(InputError, match=rf"{path}:6: no conversation: .* no message of the assistant"):
        prepare([str(path)], tokenizer, tmp_path / "out", CHAT, workers=1, unit_bytes=600)
    manifest = prepare([str(path)], tokenizer, tmp_path / "out", CHAT, workers=1, unit_bytes=600, max_bad=4)
    assert manifest.kind == "chat"
    assert manifest.counts == {"no conversation": 3, "special token": 1}
    assert any("'<|endoftext|>', which would end a turn" in example for example in manifest.examples)
    expected, found = [*said, [{**thinking, "content": "yes", "reasoning": "hm"}]], {}
    for split in SPLITS:
        entry = manifest.split(split)
        found[split] = [json.loads(record) for record in Records(tmp_path / "out", entry.shards)]
        texts = [[text for message in one for text in (message.get("reasoning", ""), message["content"]) if text]
                 for one in found[split]]  # fmt: skip
        lengths = np.load(tmp_path / "out" / entry.lengths.file)
        assert lengths.tolist() == [sum(len(loaded.encode(text)) for text in some) for some in texts]
        assert (entry.documents, entry.tokens) == (len(lengths), lengths.sum())
        assert entry.text_bytes == sum(len(text.encode()) for some in texts for text in some)
        assert found[split] == [one for one in expected if one in found[split]]
    assert len(found["train"]) + len(found["heldout"]) == len(expected)


def test_a_conversation_that_json_cannot_hold_is_refused(tmp_path, tokenizer):
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("said", pa.timestamp("s"))])
    said = [[{"role": "assistant", "content": "yes", "said": said}] for said in (None, 0)]
    pq.write_table(pa.table({"messages": pa.array(said, pa.list_(message))}), tmp_path / "in.parquet")
    inputs = [str(tmp_path / "in.parquet")]
    with pytest.raises(InputError, match=r"in\.parquet:2: no conversation: it holds what JSON cannot"):
        prepare(inputs, tokenizer, tmp_path / "out", CHAT, workers=1)
    assert prepare(inputs, tokenizer, tmp_path / "out", CHAT, workers=1, max_bad=1).counts == {"no conversation": 1}


@pytest.mark.parametrize(("tokens", "dtype"), [(256, "|u1"), (257, "<u2"), (65536, "<u2"), (65537, "<u4")])
def test_a_token_takes_the_fewest_bytes_that_hold_the_vocabulary(tmp_path, tokens, dtype):
    backend = tokenizers.Tokenizer(models.WordLevel({f"w{i}": i for i in range(tokens)}, "w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "words.json"))
    path = write_jsonl(tmp_path / "in.jsonl", [f"w1 w{tokens - 2}"])
    settings = PrepareSettings(eot=f"w{tokens - 1}", heldout=0)
    manifest = prepare([str(path)], tmp_path / "words.json", tmp_path / "out", settings, workers=1)
    assert (manifest.dtype, manifest.eot) == (dtype, f"w{tokens - 1}")
    [record] = Records(tmp_path / "out", manifest.train.shards)
    assert record == np.array([tokens - 1, 1, tokens - 2, tokens - 1], dtype).tobytes()


def test_a_text_that_makes_the_token_which_ends_documents_is_refused(tmp_path):
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "b": 2}, "a"))  # where it is not special
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(tmp_path / "words.json"))
    path, output = write_jsonl(tmp_path / "in.jsonl", ["a b", "a </s> b", "b"]), tmp_path / "out"
    with pytest.raises(InputError, match=rf"\n  {path}:2: end inside: its text makes the token '</s>'$"):
        prepare([str(path)], tmp_path / "words.json", output, PrepareSettings(heldout=0), workers=1)
    manifest = prepare([str(path)], tmp_path / "words.json", output, PrepareSettings(heldout=0), workers=1, max_bad=1)
    assert (manifest.train.documents, manifest.counts) == (2, {"end inside": 1})


# --- which are held out ----------------------------------------------------------------------------------------


def test_held_out_is_a_part_of_the_documents_that_their_content_decides(tmp_path, tokenizer):
    texts = [f"text {i}" for i in range(2000)]
    one = write_jsonl(tmp_path / "one.jsonl", texts)
    other = write_jsonl(tmp_path / "other.jsonl", [*reversed(texts), "another"])
    settings = PrepareSettings(heldout=0.2)
    prepare([str(one)], tokenizer, tmp_path / "out", settings, workers=1)
    prepare([str(other)], tokenizer, tmp_path / "back", settings, workers=1, unit_bytes=20_000)
    found, back = read_back(tmp_path / "out"), read_back(tmp_path / "back")
    assert len(found["heldout"]) == pytest.approx(400, abs=4 * (2000 * 0.2 * 0.8) ** 0.5)
    assert set(found["heldout"]) == set(back["heldout"]) - {"another"}
    prepare([str(one)], tokenizer, tmp_path / "more", PrepareSettings(heldout=0.4), workers=1)
    assert set(found["heldout"]) < set(read_back(tmp_path / "more")["heldout"])


def test_with_a_part_of_nothing_nothing_is_held_out(tmp_path, tokenizer, given_texts):
    manifest = prepare([str(given_texts)], tokenizer, tmp_path / "out", PrepareSettings(heldout=0), workers=1)
    assert (manifest.train.documents, manifest.heldout.documents, manifest.heldout.shards) == (40, 0, ())
    assert read_back(tmp_path / "out")["heldout"] == []


# --- what it does not depend on --------------------------------------------------------------------------------


def test_processes_and_tasks_change_no_byte(tmp_path, tokenizer, given_texts):
    call = {"inputs": [str(given_texts)], "tokenizer": tokenizer, "settings": QUARTER, "unit_bytes": 900}
    prepare(output=tmp_path / "one", workers=1, **call)
    prepare(output=tmp_path / "three", workers=3, **call)
    for task in (2, 0, 1):
        assert prepare(output=tmp_path / "tasks", workers=1, task=task, tasks=3, **call) is None
    assert not (tmp_path / "tasks" / MANIFEST).exists()
    manifest = merge(tmp_path / "tasks")
    assert len(manifest.train.shards) > 3
    assert contents(tmp_path / "three") == contents(tmp_path / "one") == contents(tmp_path / "tasks")
    check_nothing_else(tmp_path / "one")


def test_the_size_of_a_unit_changes_no_document(tmp_path, tokenizer, given_texts):
    found = []
    for unit_bytes in (None, 130, 777, 3000):
        output = tmp_path / f"out{unit_bytes}"
        manifest = prepare([str(given_texts)], tokenizer, output, QUARTER, unit_bytes=unit_bytes or 10**6, workers=1)
        lengths = (output / manifest.train.lengths.file).read_bytes()
        found.append((read_back(output), lengths, manifest.train.tokens))
    assert all(some == found[0] for some in found)


def test_more_tasks_than_units_leave_some_without_work(tmp_path, tokenizer, given_texts):
    for task in range(4):
        prepare([str(given_texts)], tokenizer, tmp_path / "out", QUARTER, workers=1, task=task, tasks=4)
    merge(tmp_path / "out")
    check_same(make_texts(40), read_back(tmp_path / "out"))


def test_a_tokenizer_of_another_file_is_not_remembered(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "in.jsonl", make_texts(20))
    train_tokenizer(["zzzz yyyy xxxx " * 20], 280).save(tmp_path / "other.json")
    for name in (tokenizer, tmp_path / "other.json"):
        prepare([str(path)], name, tmp_path / "out", QUARTER, workers=1)
        check_same(make_texts(20), read_back(tmp_path / "out"))
        for file in (tmp_path / "out").iterdir():
            file.unlink()


# --- kills -----------------------------------------------------------------------------------------------------


class Command:
    """The command in a process of its own, which is killed alone: what it started must end by itself."""

    def __init__(self, given, tokenizer, output, unit_bytes, workers):
        arguments = [str(argument) for argument in (given, tokenizer, output, unit_bytes, workers)]
        script = output.with_name("driver.py")
        script.write_text(DRIVER)
        self.process = subprocess.Popen(
            [sys.executable, script, *arguments], env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def wait_for(self, ready):
        """Whether that came about before the process ended."""
        while self.process.poll() is None:
            if ready():
                return True
            time.sleep(0.001)
        return False

    def kill(self):
        """Kill the process, see that those it started end too, and return its exit status."""
        self.process.kill()
        status = self.process.wait()
        until = time.monotonic() + 5  # they look several times a second
        while self.others() and time.monotonic() < until:
            time.sleep(0.02)
        assert self.others() == []
        return status

    def others(self):
        """Processes of the command that live."""
        found = []
        for pid in psutil.pids():
            try:
                if os.getsid(pid) == self.process.pid and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    found.append(pid)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return found


def count_notes(folder):
    return len(list(folder.glob("unit-*.json")))


def test_kills_in_the_middle_change_no_byte(tmp_path, tokenizer):
    given_texts, unit_bytes = write_jsonl(tmp_path / "in.jsonl", make_texts(1000)), 3000
    units = len(list_units([str(given_texts)], unit_bytes=unit_bytes))
    prepare([str(given_texts)], tokenizer, tmp_path / "good", QUARTER, unit_bytes=unit_bytes, workers=1)
    output, rng, interrupted = tmp_path / "out", random.Random(0), 0
    for workers in (2, 1, 1):
        before = count_notes(output)
        target = before + rng.randint(1, units // 4)
        command = Command(given_texts, tokenizer, output, unit_bytes, workers)
        command.wait_for(lambda target=target: count_notes(output) >= target)
        time.sleep(rng.uniform(0, 0.03))
        assert command.kill() == -signal.SIGKILL
        assert not (output / MANIFEST).exists()
        interrupted += before < count_notes(output) < units
    assert interrupted == 3
    prepare([str(given_texts)], tokenizer, output, QUARTER, unit_bytes=unit_bytes, workers=1)
    assert contents(output) == contents(tmp_path / "good")
    check_nothing_else(output)


def check_every_moment(folder, tokenizer, given_texts, *, unit_bytes, tasks, part):
    prepare([str(given_texts)], tokenizer, folder / "good", QUARTER, unit_bytes=unit_bytes, workers=1)
    done = subprocess.run(
        [sys.executable, "-c", SWEEP, given_texts, tokenizer, folder / "good", folder / "out", str(unit_bytes),
         str(tasks), str(part)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["wrong"] == []
    return result["moments"]


def test_a_kill_before_any_change_of_a_file_changes_no_byte(tmp_path, tokenizer):
    given_texts = write_jsonl(tmp_path / "in.jsonl", make_texts(12))
    assert check_every_moment(tmp_path, tokenizer, given_texts, unit_bytes=900, tasks=1, part=0.3) >= 15


def test_two_calls_at_once_cannot_do_the_same_task(tmp_path, tokenizer):
    path, output = write_jsonl(tmp_path / "in.jsonl", make_texts(2000)), tmp_path / "out"
    command = Command(path, tokenizer, output, 300, 1)
    try:
        assert command.wait_for(lambda: count_notes(output) > 0)
        with pytest.raises(InputError, match=rf"^--output \({output}\) is in use: another process"):
            prepare([str(path)], tokenizer, output, QUARTER, unit_bytes=300, workers=1)
        assert command.process.poll() is None
    finally:
        command.kill()
    with pytest.raises(InputError, match=r"is not complete; run the same prepare command again to finish it\.$"):
        open_manifest(output)


# --- documents that cannot be used -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        (b'{"text": "a"', "invalid JSON", "delimiter"),
        (b'{"text": "caf\xe9"}', "not UTF-8", "offset 13"),
        (b'{"text": "\\ud800"}', "not UTF-8", "surrogate"),
        (b'{"text": " \\n"}', "empty", "white space"),
        (b'{"text": null}', "empty", "null"),
        (b'{"body": "a"}', "no field", "no key 'text'"),
        (b'{"text": 3}', "wrong type", "int"),
        (b'["text"]', "wrong type", "list"),
        (b'{"text": [{"role": "user", "content": "a"}]}', "wrong type", "--chat"),
    ],
)
def test_a_document_that_cannot_be_used_is_refused_and_told_where_it_is(tmp_path, tokenizer, line, reason, detail):
    texts, output = make_texts(30), tmp_path / "out"
    lines = [{"text": text} for text in texts]
    path = write_lines(tmp_path / "in.jsonl", [*lines[:20], b"", line, *lines[20:]])  # a blank line counts as one
    with pytest.raises(InputError) as error:
        prepare([str(path)], tokenizer, output, QUARTER, unit_bytes=400, workers=1)
    first, *rest = str(error.value).splitlines()
    assert first.startswith(f"1 document cannot be used (1 {reason}). --max-bad allows 0: mend ")
    assert len(rest) == 1
    assert rest[0].startswith(f"  {path}:22: {reason}: ")
    assert detail in rest[0]
    assert not (output / MANIFEST).exists()
    with pytest.raises(InputError, match="is not complete"):
        merge(output)
    before = contents(output)
    assert count_notes(output) > 3
    manifest = prepare([str(path)], tokenizer, output, QUARTER, unit_bytes=400, workers=1, max_bad=1)
    assert manifest.counts == {reason: 1}
    assert manifest.examples == (rest[0].strip(),)
    check_same(texts, read_back(output))
    shards = {name: data for name, data in before.items() if name.endswith(".arrayrecord")}
    assert shards.items() <= contents(output).items()
    assert f"left out, {reason}: 1\n    {rest[0].strip()}" in summary(output, manifest)


def test_a_text_file_that_cannot_be_used_is_refused_by_its_name(tmp_path, tokenizer):
    folder = write_input(tmp_path, "texts", make_texts(5))
    (folder / "part0" / "003x.txt").write_bytes(b"\xff")
    with pytest.raises(InputError, match=rf"\n  {folder}/part0/003x\.txt:1: not UTF-8"):
        prepare([str(folder)], tokenizer, tmp_path / "out", QUARTER, workers=1)


def test_what_may_be_left_out_is_counted_over_units_and_processes(tmp_path, tokenizer):
    texts, output = make_texts(60), tmp_path / "out"
    lines = [{"text": text} if i % 10 else {"body": text} for i, text in enumerate(texts)]
    path = write_lines(tmp_path / "in.jsonl", lines)
    call = {"inputs": [str(path)], "tokenizer": tokenizer, "output": output, "settings": QUARTER, "unit_bytes": 700}
    with pytest.raises(InputError, match=r"documents cannot be used \(\d no field\)\. --max-bad allows 4"):
        prepare(workers=2, max_bad=4, **call)
    done = {note: note.stat().st_mtime_ns for note in output.glob("unit-*.json")}
    assert done
    with pytest.raises(InputError, match=r"^6 documents .* --max-bad allows 5"):
        prepare(workers=1, max_bad=5, **call)
    assert {note: note.stat().st_mtime_ns for note in done} == done  # what is done is not done again
    manifest = prepare(workers=1, max_bad=6, **call)
    assert manifest.counts == {"no field": 6}
    assert [re.search(r":(\d+):", example)[1] for example in manifest.examples] == ["1", "11", "21", "31", "41", "51"]
    check_same([text for i, text in enumerate(texts) if i % 10], read_back(output))


def test_a_task_that_left_out_too_much_is_not_merged(tmp_path, tokenizer):
    lines = [{"text": text} if i % 10 else {"body": text} for i, text in enumerate(make_texts(40), 1)]
    path, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out"
    with pytest.raises(InputError, match=r"^4 documents .* --max-bad allows 3"):  # in the last unit
        prepare([str(path)], tokenizer, output, QUARTER, unit_bytes=1300, workers=1, max_bad=3)
    with pytest.raises(InputError, match="is not complete; run the same prepare command again"):
        merge(output)
    assert not (output / MANIFEST).exists()


# --- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": 3, "tasks": 3}, r"^--task is 3, but must be at least 0 and below --of \(3\)"),
        ({"task": -1}, "^--task is -1"),
        ({"tasks": 0}, r"^--task is 0, but must be at least 0 and below --of \(0\)"),
        ({"workers": 0}, "^--workers is 0, but must be at least 1"),
        ({"unit_bytes": 0}, "^unit_bytes is 0"),
        ({"settings": PrepareSettings(heldout=1.5)}, r"^--heldout is 1\.5, but must be at least 0 and below 1"),
        ({"settings": PrepareSettings(heldout=-0.1)}, r"^--heldout is -0\.1"),
        ({"settings": PrepareSettings(heldout=float("nan"))}, "^--heldout is nan"),
        ({"settings": PrepareSettings(eot="<|end|>")}, r"has no token '<\|end\|>' to end a document with"),
        ({"tokenizer": Path("missing.json")}, r"^The tokenizer file missing\.json cannot be read"),
        ({"inputs": ["missing.jsonl"]}, r"^The input missing\.jsonl cannot be read"),
        ({"inputs": []}, "at least one file or folder"),
    ],
)
def test_a_value_that_cannot_be_is_refused_before_all_else(tmp_path, tokenizer, given_texts, change, message):
    call = {"inputs": [str(given_texts)], "tokenizer": tokenizer, "settings": QUARTER, "workers": 1, **change}
    with pytest.raises(InputError, match=message):
        prepare(output=tmp_path / "out", **call)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_is_none_or_has_no_known_end_is_refused(tmp_path, given_texts):
    words = {f"w{i}": i for i in range(10)}
    for name, more in {"none": {}, "both": {"</s>": 10, "<eos>": 11}}.items():
        tokenizers.Tokenizer(models.WordLevel({**words, **more}, "w0")).save(str(tmp_path / f"{name}.json"))
    for name, message in {
        "in.jsonl": r"^The tokenizer file .*in\.jsonl cannot be read",
        "none.json": r"none\.json has none of <\|endoftext\|>, .*; name the token that ends a document with --eot",
        "both.json": r"both\.json has <eos> and </s>; name the token that ends a document with --eot",
    }.items():
        with pytest.raises(InputError, match=message):
            prepare([str(given_texts)], tmp_path / name, tmp_path / "out", QUARTER, workers=1)
    settings = PrepareSettings(eot="<eos>")
    assert prepare([str(given_texts)], tmp_path / "both.json", tmp_path / "out", settings, workers=1).eot == "<eos>"


def test_an_output_that_is_or_lies_below_a_file_is_refused(tmp_path, tokenizer, given_texts):
    with pytest.raises(InputError, match=r"^--output is '.*in\.jsonl', which is a file, but must be a folder"):
        prepare([str(given_texts)], tokenizer, given_texts, QUARTER, workers=1)
    with pytest.raises(InputError, match=r"^--output \(.*in\.jsonl/out\) cannot be written: Not a directory"):
        prepare([str(given_texts)], tokenizer, given_texts / "out", QUARTER, workers=1)


def test_a_finished_folder_is_left_as_it_is_and_refused_to_others(tmp_path, tokenizer, given_texts):
    output = tmp_path / "out"
    call = {"inputs": [str(given_texts)], "tokenizer": tokenizer, "output": output, "workers": 1}
    manifest = prepare(settings=QUARTER, **call)
    before = contents(output)
    assert prepare(settings=QUARTER, **call) == manifest
    assert prepare(settings=QUARTER, **call, task=1, tasks=2) == manifest  # of documents that are the same
    assert contents(output) == before
    with pytest.raises(InputError, match=f"^The folder {output} holds data prepared of other inputs or settings"):
        prepare(settings=PrepareSettings(heldout=0.5), **call)
    write_jsonl(given_texts, make_texts(41))
    with pytest.raises(InputError, match="other inputs or settings"):
        prepare(settings=QUARTER, **call)
    assert contents(output) == before


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"settings": PrepareSettings(heldout=0.5)}, r"heldout: 0\.25, now 0\.5"),
        ({"settings": PrepareSettings(field="body", heldout=0.25)}, "field: 'text', now 'body'"),
        ({"settings": CHAT}, "kind: 'tokens', now 'chat'"),
        ({"settings": PrepareSettings(suffixes=(".md",), heldout=0.25)}, "suffixes"),
        ({"tasks": 3}, "tasks: 2, now 3"),
        ({"unit_bytes": 2000}, r"units: \d+, now \d"),
        ({"tokenizer": "other.json"}, "tokenizer"),
        ({"inputs": ["other.jsonl"]}, "inputs"),
        ({"changed": "size"}, "files"),
        ({"changed": "time"}, "files"),
    ],
)
def test_an_unfinished_folder_is_refused_to_another_preparation(tmp_path, tokenizer, given_texts, change, key):
    train_tokenizer(["a b c"], 280).save(tmp_path / "other.json")
    write_jsonl(tmp_path / "other.jsonl", make_texts(40, seed=1))
    call = {"inputs": [str(given_texts)], "tokenizer": tokenizer, "settings": QUARTER, "tasks": 2, "unit_bytes": 900}
    output = tmp_path / "out"
    assert prepare(output=output, workers=1, **call) is None
    before = contents(output)
    if change.get("changed") == "size":
        write_jsonl(given_texts, make_texts(41))
    elif change.get("changed") == "time":
        os.utime(given_texts, (1, 1))
    else:
        call |= change
        call |= {"tokenizer": tmp_path / call["tokenizer"], "inputs": [str(tmp_path / call["inputs"][0])]}
    with pytest.raises(InputError, match=f"^The folder {output} holds an unfinished preparation with other {key}"):
        prepare(output=output, workers=1, **call)
    assert contents(output) == before


def test_a_megatron_index_that_changed_is_noticed(tmp_path, tokenizer):
    path = write_megatron(tmp_path / "in", [[5, 6, 7, 8], [9, 10], [11, 12]])
    call = {"inputs": [str(path)], "tokenizer": tokenizer, "settings": QUARTER, "tasks": 2, "unit_bytes": 8}
    prepare(output=tmp_path / "out", workers=1, **call)
    stat = path.stat()
    write_megatron(tmp_path / "in", [[5, 6], [7, 8, 9, 10], [11, 12]])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # the same tokens in the .bin
    with pytest.raises(InputError, match="unfinished preparation with other files"):
        prepare(output=tmp_path / "out", workers=1, task=1, **call)


# --- merging ---------------------------------------------------------------------------------------------------


def test_tasks_that_are_missing_are_named_with_what_to_do(tmp_path, tokenizer, given_texts):
    output = tmp_path / "out"
    call = {"inputs": [str(given_texts)], "tokenizer": tokenizer, "output": output, "settings": QUARTER}
    call |= {"unit_bytes": 900, "tasks": 3, "workers": 1}
    prepare(task=1, **call)
    for look in (merge, open_manifest):
        with pytest.raises(InputError, match=r"of its 3 tasks, 0, 2 are missing\. Run them with --task, then merge"):
            look(output)
    prepare(task=0, **call)
    assert missing_tasks(output) == [2]
    for look in (merge, open_manifest):
        with pytest.raises(InputError, match="of its 3 tasks, 2 is missing"):
            look(output)
    prepare(task=2, **call)
    with pytest.raises(InputError, match=f"is not merged; run python -m zaya_jax.data merge {output}"):
        open_manifest(output)
    assert merge(output) == open_manifest(output)
    check_same(make_texts(40), read_back(output))


def test_merging_again_is_harmless(tmp_path, tokenizer, given_texts):
    output = tmp_path / "out"
    manifest = prepare([str(given_texts)], tokenizer, output, QUARTER, workers=1)
    before = contents(output)
    assert merge(output) == manifest
    assert contents(output) == before


def test_a_folder_without_a_preparation_is_not_merged(tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(InputError, match=rf"^The folder {tmp_path} holds no preparation: .*plan\.json cannot be read"):
        merge(tmp_path)
    assert contents(tmp_path) == {"file": b"text"}
    for path in (tmp_path / "file", tmp_path / "missing"):
        with pytest.raises(InputError, match=f"^{path} is no folder; give the --output of prepare"):
            merge(path)
    assert not (tmp_path / "missing").exists()


def test_a_plan_of_another_version_is_not_merged(tmp_path, tokenizer, given_texts):
    prepare([str(given_texts)], tokenizer, tmp_path / "out", QUARTER, workers=1, tasks=2)
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    (tmp_path / "out" / "plan.json").write_text(json.dumps({**plan, "format": 99}))
    with pytest.raises(InputError, match="it is of format 99, but this version reads 2"):
        merge(tmp_path / "out")


@pytest.mark.parametrize("damage", ["missing", "shorter"])
def test_a_shard_that_is_gone_or_cut_before_the_merge_is_done_again(tmp_path, tokenizer, given_texts, damage):
    output = tmp_path / "out"
    call = {"inputs": [str(given_texts)], "tokenizer": tokenizer, "settings": QUARTER, "unit_bytes": 900, "workers": 1}
    prepare(output=tmp_path / "good", **call)
    for task in (0, 1):
        prepare(output=output, task=task, tasks=2, **call)
    assert missing_tasks(output) == []
    shard = output / "train-000003.arrayrecord"
    if damage == "missing":
        shard.unlink()
    else:
        os.truncate(shard, shard.stat().st_size // 2)
    assert read_note(output, 3) is None
    assert missing_tasks(output) == [1]
    with pytest.raises(InputError, match="of its 2 tasks, 1 is missing"):
        merge(output)
    other = (output / "train-000001.arrayrecord").stat().st_mtime_ns
    prepare(output=output, task=1, tasks=2, **call)
    assert (output / "train-000001.arrayrecord").stat().st_mtime_ns == other
    merge(output)
    assert contents(output) == contents(tmp_path / "good")


# --- damage afterwards -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("finished")
    path = write_jsonl(folder / "in.jsonl", make_texts(40))
    return folder / "out", prepare([str(path)], tokenizer, folder / "out", QUARTER, unit_bytes=900, workers=1)


@given(data=st.data(), bit=st.integers(0, 7))
def test_a_flipped_bit_is_reported_with_the_name_of_its_file(tmp_path_factory, finished, data, bit):
    folder, manifest = finished
    entry = data.draw(st.sampled_from(manifest.files()))
    offset = data.draw(st.integers(0, entry.bytes - 1))
    cache = tmp_path_factory.mktemp("cache")
    verify_files(folder, manifest, cache, remedy(folder))  # it is noted as good, and read again once it has changed
    good = (folder / entry.file).read_bytes()
    try:
        (folder / entry.file).write_bytes(good[:offset] + bytes([good[offset] ^ 1 << bit]) + good[offset + 1 :])
        with pytest.raises(InputError, match=rf"^The data file {folder}/{entry.file} was altered: .* Bring the file"):
            verify_files(folder, open_manifest(folder), cache, remedy(folder))
    finally:
        (folder / entry.file).write_bytes(good)
    verify_files(folder, manifest, cache, remedy(folder))


@pytest.mark.parametrize("damage", ["flipped", "shorter", "missing"])
def test_a_run_names_the_shard_that_was_damaged(tmp_path, tokenizer, given_texts, damage):
    output = tmp_path / "out"
    manifest = prepare([str(given_texts)], tokenizer, output, QUARTER, unit_bytes=900, workers=1)
    sources = Table({"books": SourceConfig(str(output))})
    config = Config(
        MODEL, (PhaseConfig(tokens=512),), data=DataConfig(sources=sources, cache_dir=str(tmp_path / "cache"))
    )
    assert open_sources(config).sources["books"].manifest == manifest
    shard = output / manifest.train.shards[2].file
    if damage == "flipped":
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    elif damage == "shorter":
        os.truncate(shard, shard.stat().st_size - 1)
    else:
        shard.unlink()
    with pytest.raises(InputError, match=f"The data file {shard} ") as error:
        open_sources(config)
    if damage != "flipped":  # told at once, by the size
        assert str(error.value).startswith("data.sources.books cannot be read. ")
        with pytest.raises(InputError, match=f"The data file {shard} "):
            prepare([str(given_texts)], tokenizer, output, QUARTER, unit_bytes=900, workers=1)


def test_a_folder_of_something_else_is_left_alone(tmp_path, tokenizer):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("text")
    source = write_jsonl(tmp_path / "in.jsonl", ["one", "two"])
    with pytest.raises(InputError, match=r"mine holds other files, such as 'letter\.txt'; choose a new or an empty"):
        prepare([str(source)], tokenizer, tmp_path / "mine", PrepareSettings(), workers=1)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter.txt"]
