"""`zaya data tokenizer`: what is trained, what is measured, and what is refused."""

import json

import matplotlib.image
import pytest

from tests.data.prepare_helpers import make_texts, write_jsonl, write_lines
from zaya_jax.data.__main__ import main
from zaya_jax.data.prepare.tokenizer_training import _MEASURED, TrainingTexts, train_on
from zaya_jax.data.special_tokens import find_special_tokens
from zaya_jax.data.tokenizer import EOT_TEXT, load_tokenizer
from zaya_jax.errors import InputError


@pytest.fixture
def sources(tmp_path):
    """Two files of texts, of which one compresses well."""
    web = write_jsonl(tmp_path / "web.jsonl", make_texts(600))
    code = write_jsonl(tmp_path / "code.jsonl", [f"{n} = {n * 7919 % 10007} ^ {n * 31 % 997}" for n in range(600)])
    return [str(web), str(code)]


def test_the_command_trains_measures_and_writes_what_prepare_and_training_read(sources, tmp_path, capsys):
    output = tmp_path / "tokenizer"
    assert main(["tokenizer", "--input", *sources, "--vocab-size", "320", "--output", str(output)]) == 0
    path = output / "tokenizer.json"
    special = find_special_tokens(path, chat=False, eot=None, bos=None)
    tokenizer = load_tokenizer(path, special.eot, special.bos)
    assert (special.eot, special.bos, tokenizer.vocab_size) == (EOT_TEXT, EOT_TEXT, 320)
    assert [tokenizer.token_id(text) for text in (EOT_TEXT, "<|im_start|>", "<|im_end|>")] == [0, 1, 2]
    assert tokenizer.specials == {EOT_TEXT, "<|im_start|>", "<|im_end|>"}
    every = "".join(map(chr, range(0x250))) + "☃"
    assert tokenizer.decode(tokenizer.encode(every)) == every
    head, columns, web, code = capsys.readouterr().out.splitlines()
    assert head == f"{path}: 320 tokens; 256 of 256 bytes; special: {EOT_TEXT}, <|im_start|>, <|im_end|>."
    assert columns.split()[-1] == "bytes/token"
    assert [line.split()[0] for line in (web, code)] == sources
    for line, source in ((web, sources[0]), (code, sources[1])):
        texts = TrainingTexts([source], ["text"])
        trained = list(texts)
        (each,) = texts.sources
        assert len(trained) + len(each.measured) == 600  # and no text is in both
        assert not {*trained} & {*each.measured}
        assert 0.3 * _MEASURED < len(each.measured) / 600 < 3 * _MEASURED
        size, tokens = (
            sum(len(text.encode()) for text in each.measured),
            sum(map(len, map(tokenizer.encode, each.measured))),
        )
        assert line.split()[1:] == [str(len(trained)), f"{size:,}", f"{tokens:,}", f"{size / tokens:.2f}"]
    assert float(web.split()[-1]) > float(code.split()[-1]) > 1
    assert matplotlib.image.imread(output / "compression.png").size
    assert main(["prepare", "--input", sources[0], "--tokenizer", str(output), "--output", str(tmp_path / "out")]) == 0
    before = path.read_bytes()
    assert main(["tokenizer", "--input", *sources, "--vocab-size", "300", "--output", str(output)]) == 2
    assert f"--output is '{output}', but must be a new or empty folder." in capsys.readouterr().err
    assert path.read_bytes() == before


def test_of_a_large_input_a_part_of_each_source_is_trained_on(sources):
    whole = TrainingTexts(sources, ["text"])
    size = sum(unit.bytes for source in whole.sources for unit in source.units)
    half = TrainingTexts(sources, ["text"], most_bytes=size // 2)
    assert {*half} < {*whole}
    for each, other in zip(half.sources, whole.sources, strict=True):
        assert each.measured == other.measured
        assert 0.4 < each.trained / other.trained < 0.6


def test_conversations_are_trained_on_without_their_form(tmp_path):
    said = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "reasoning": "Add.", "content": "5"}]
    lines = [{"messages": said}, {"instruction": "Say hi.", "output": "hi"}, {"messages": [{"role": "user"}]}, {"a": 1}]
    path = write_lines(tmp_path / "in.jsonl", lines)
    texts = TrainingTexts([str(path)], ["messages"], max_bad=2)
    assert list(texts) == ["2 + 3?", "Add.", "5", "Say hi.", "hi"]
    assert texts.check() == "Left out: 2 documents (1 not a conversation, 1 no field)."
    strict = TrainingTexts([str(path)], ["messages"], max_bad=1)
    list(strict)
    with pytest.raises(
        InputError, match=rf"^2 documents cannot be used .*; the first is {path}:3: message 1 has a content"
    ):
        strict.check()


@pytest.mark.parametrize(("size", "special", "message"), [
    (258, ["<a>", "<b>"], rf"--vocab-size is 258, but must be at least 259: one token per byte, plus .*{'<a>, <b>'}\."),
    (300, ["<a>", "<a>"], r"--special is \['<a>', '<a>'\], but must be a list of distinct texts"),
    (300, [EOT_TEXT], "--special is .* but must be a list of distinct texts, none of them empty"),
])  # fmt: skip
def test_what_has_no_tokens_is_refused_and_leaves_nothing(sources, tmp_path, size, special, message):
    with pytest.raises(InputError, match=message):
        train_on(TrainingTexts(sources, ["text"]), tmp_path / "out", size, special)
    assert not (tmp_path / "out").exists()


def test_each_source_is_read_by_its_own_field(tmp_path):
    talk = {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]}
    inputs = {"body": {"body": "a body", "text": "b"}, "messages": talk, "text": {"body": "c", "text": "a text"}}
    paths = [str(write_lines(tmp_path / f"{name}.jsonl", [record] * 3)) for name, record in inputs.items()]
    texts = TrainingTexts(paths, list(inputs))
    assert list(texts) == [*["a body"] * 3, *["Hi.", "Hello."] * 3, *["a text"] * 3]
    for fields in ([], ["body", "text"]):
        with pytest.raises(InputError, match=r"^--field is '.*', but must be one name, or one for each --input"):
            TrainingTexts(paths, fields)


def test_inputs_without_a_text_are_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": ""}))
    with pytest.raises(InputError, match=r"^The inputs contain no document to train on: "):
        train_on(TrainingTexts([str(path)], ["text"], max_bad=1), tmp_path / "out", 300)
