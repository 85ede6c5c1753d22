"""What begins and ends documents, by the configuration beside a tokenizer and by its vocabulary."""

import json

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from tests.data.prepare_helpers import CHAT, write_jsonl
from zaya_jax.data.prepare.manifest import MANIFEST, describe_file
from zaya_jax.data.prepare.preparation import PrepareSettings, open_manifest, prepare
from zaya_jax.data.prepare.shards import open_documents
from zaya_jax.data.special_tokens import SpecialTokens, find_special_tokens, other_tokens
from zaya_jax.errors import InputError

GEMMA = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}, "add_bos_token": True}
QWEN = {"bos_token": None, "eos_token": "<turn|>", "add_bos_token": False}


@pytest.fixture
def write(tmp_path):
    def write(specials=("<bos>", "<eos>", "<turn|>"), config=None):
        backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, "<unk>"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        backend.add_special_tokens(list(specials))
        backend.save(str(tmp_path / "tokenizer.json"))
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return tmp_path / "tokenizer.json"

    return write


@pytest.mark.parametrize(
    ("config", "call", "expected"),
    [
        (GEMMA, {}, ("<eos>", "<bos>", "<eos>")),
        ({**GEMMA, "add_bos_token": False}, {}, ("<eos>", None, "<eos>")),
        ({**GEMMA, "add_bos_token": False}, {"chat": True}, ("<eos>", "<bos>", "<eos>")),
        (GEMMA, {"bos": "none"}, ("<eos>", None, "<eos>")),
        (GEMMA, {"bos": "<turn|>"}, ("<eos>", "<turn|>", "<eos>")),
        (QWEN, {}, ("<eos>", None, "<turn|>")),
        (QWEN, {"chat": True, "bos": "<bos>"}, ("<eos>", "<bos>", "<turn|>")),
        (QWEN, {"eot": "<turn|>"}, ("<turn|>", None, "<turn|>")),
        ({"eos_token": None}, {}, ("<eos>", "<bos>", None)),
        (None, {}, ("<eos>", "<bos>", "<eos>")),
    ],
)
def test_the_configuration_beside_the_tokenizer_names_them(write, config, call, expected):
    call = {"chat": False, "eot": None, "bos": None, **call}
    assert find_special_tokens(write(config=config), **call) == expected


def test_without_a_configuration_the_vocabulary_does(write):
    call = {"chat": False, "eot": None, "bos": None}
    assert find_special_tokens(write(["</s>"]), **call) == ("</s>", "</s>", "</s>")
    with pytest.raises(InputError, match=r"has <eos> and </s>; .* with --eot"):
        find_special_tokens(write(["<eos>", "</s>"]), **call)
    with pytest.raises(InputError, match=r"has <bos> and <s>; .* with --bos"):
        find_special_tokens(write(["<bos>", "<s>", "</s>"]), **call)
    both = write(["<bos>", "<eos>", "</s>"], config=GEMMA)  # as Gemma's own has them
    assert find_special_tokens(both, **call) == ("<eos>", "<bos>", "<eos>")


@pytest.mark.parametrize(
    ("config", "bos", "message"),
    [
        ({"bos_token": "<start>"}, None, r"bos_token of .*config\.json is '<start>', which .* does not have"),
        (GEMMA, "<start>", r"^--bos is '<start>', which the tokenizer file .* does not have"),
        ({"bos_token": 5}, None, r"bos_token of .*config\.json is 5, but must be"),
        ([], None, r"config\.json is not a JSON object"),
    ],
)
def test_what_is_no_token_is_refused(write, config, bos, message):
    with pytest.raises(InputError, match=message):
        find_special_tokens(write(config=config), chat=False, eot=None, bos=bos)


@pytest.mark.parametrize(("bos", "prefix"), [(None, [3]), ("none", []), ("<eos>", [4])])
def test_documents_begin_and_end_with_them_and_the_tokenizer_is_carried_along(tmp_path, write, bos, prefix):
    tokenizer = write(config=GEMMA)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    path, output = write_jsonl(tmp_path / "in.jsonl", ["a b", "b"]), tmp_path / "out"
    manifest = prepare([str(path)], tokenizer, output, PrepareSettings(heldout=0, bos=bos), workers=1)
    assert manifest.special == ("<eos>", "<eos>" if prefix == [4] else "<bos>" if prefix else None, "<eos>")
    documents = open_documents(output, manifest, "train")
    assert [documents[i].tokens.tolist() for i in range(2)] == [[*prefix, 0, 1, 4], [*prefix, 1, 4]]
    carried = [tokenizer.name, "tokenizer_config.json", "chat_template.jinja"]
    for name in carried:
        assert describe_file(output / name) == describe_file(tmp_path / name)
    assert [entry.file for entry in manifest.extras] == carried[1:]


def test_a_manifest_without_them_means_the_token_that_ends_documents(tmp_path, write):
    path, output = write_jsonl(tmp_path / "in.jsonl", [[{"role": "assistant", "content": "a"}]], "messages"), "out"
    manifest = prepare([str(path)], write(config=GEMMA), tmp_path / output, CHAT, workers=1)
    assert manifest.special == SpecialTokens("<eos>", "<bos>", "<eos>")
    tree = json.loads((tmp_path / output / MANIFEST).read_text())
    del tree["bos"], tree["eos"]
    (tmp_path / output / MANIFEST).write_text(json.dumps(tree))
    assert open_manifest(tmp_path / output).special == SpecialTokens("<eos>", "<eos>", "<eos>")


@pytest.mark.parametrize("added", [{}, {"added_tokens_decoder": {}}])
def test_templates_receive_the_other_tokens_by_name_as_in_transformers(tmp_path, added):
    config = {"unk_token": "<unk>", "pad_token": {"content": "<pad>"}, "cls_token": None, "eos_token": "</s>", **added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"sep_token": "<sep>", "pad_token": "<p>"}))
    older = {} if added else {"sep_token": "<sep>", "pad_token": "<p>"}  # which newer configurations replace
    assert other_tokens(tmp_path) == {"unk_token": "<unk>", "pad_token": "<pad>"} | older
    assert other_tokens(tmp_path / "empty") == {}
