"""`zaya config`: what is printed of keys, YAML with comments, names of other libraries."""

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.config_helpers import SMALL, SOURCES, refused_to_load, written
from zaya_jax.config import load_config, to_dict, to_yaml
from zaya_jax.config.__main__ import explain, main
from zaya_jax.config.loader import flatten_keys
from zaya_jax.config.other_names import _IN_TOKENS, _SAME, _SENTENCES, TRANSLATED, example
from zaya_jax.config.reference import generic, keys_by_place, sections
from zaya_jax.config.shipped import shipped_names
from zaya_jax.main import main as train

KEYS = [key for section in sections() for key in section.keys]


@pytest.mark.parametrize("name", shipped_names())
def test_yaml_with_comments_is_the_same_configuration_and_comments_every_key(name, tmp_path):
    config = load_config(name)
    text = to_yaml(config, comments=True)
    assert load_config(written(tmp_path, text)) == config
    leaves = [line for line in to_yaml(config).splitlines() if re.match(r" *(- )?\w+: \S", line)]
    assert text.count("# ") >= len(leaves) - sum(len(phase.mixture) + 2 for phase in config.phases)


@given(
    prompt=st.text(min_size=1).filter(lambda text: text.isprintable()) | st.sampled_from(["a\n\n b", " # c", "- x: y"])
)
def test_text_survives_comments(tmp_path_factory, prompt):
    sample, data = dataclasses.replace(SMALL.sample, prompt=prompt), dataclasses.replace(SMALL.data, sources=SOURCES)
    config = dataclasses.replace(SMALL, sample=sample, data=data)
    path = written(tmp_path_factory.mktemp("comments"), to_yaml(config, comments=True))
    assert load_config(path) == config


def test_the_command_prints_yaml_with_comments(capsys):
    assert train(["configs/tiny.yaml", "--print-config", "--comments"]) == 0
    assert (
        "# Seed of initialization, data order and sampling; at least 0 (whole number; default: 0)"
        in capsys.readouterr().out
    )
    assert train(["configs/tiny.yaml", "--comments"]) == 2
    assert capsys.readouterr().err == "Error: --comments requires --print-config: add it, or remove --comments.\n"


def test_every_key_of_a_configuration_is_found_with_its_own_names():
    for name in shipped_names():
        tree = to_dict(load_config(name))
        tree["phases"] = {phase["name"]: phase for phase in tree["phases"]}
        for key, _ in flatten_keys(tree):
            # a mixture's sources are no keys
            assert {generic(key), generic(key.rpartition(".")[0])} & {*keys_by_place()}, key


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_a_key_is_explained_by_its_full_name(key):
    lines = explain(key.name)
    assert lines[0] == key.name
    assert any(line.split() == ["default", *key.default.split()] for line in lines)
    assert any(line.split() == ["type", *key.kind.split()] for line in lines)


@pytest.mark.parametrize(("text", "first", "contained"), [
    ("", "section ", "optimizer.muon "),
    ("optimizer.muon", "Muon for attention", "optimizer.muon.momentum_form "),
    ("phases.pretrain.schedule", "phases.NAME.schedule", "phases.NAME.schedule.peak "),
    ("vocab_size", "model.vocab_size", "configs/tiny.yaml "),
    ("phases.x.tokens", "phases.NAME.tokens", "docs/training.md"),
    ("phases.x.batch", "phases.NAME.batch", "phases.NAME.batch.stepped.INDEX.until "),
    ("optimizer.roles", "One section for each", "optimizer.roles.bias.weight_decay "),
    ("optimizer.roles.bias.weight_decay", "optimizer.roles.bias.weight_decay", "default "),
    ("learning rate", "key ", "optimizer.adamw.learning_rate "),
    ("lr", "lr is a name of other libraries. Here it is optimizer.muon.learning_rate", ""),
])  # fmt: skip
def test_sections_keys_and_words_are_found(text, first, contained):
    lines = explain(text)
    assert lines[0].startswith(first)
    assert any(contained in line for line in lines)


def test_an_unknown_word_is_refused_with_the_nearest(capsys):
    assert main(["vocab_siez"]) == 2
    assert (
        capsys.readouterr().err == "Error: No key has 'vocab_siez' in its name or meaning. Did you mean vocab_size?\n"
    )


def test_names_of_other_libraries_lead_to_keys_that_exist():
    every = {key.name for key in KEYS} | {"parallel.fsdp"}
    texts = [*_SAME, *_IN_TOKENS, *_SENTENCES]
    named = {name for text in texts for name in re.findall(r"(?:\w+\.)+\w+|\brun_dir\b|\binit_from\b", text)}
    assert {name for name in named if not name.startswith("zaya_jax")} <= every
    names = " ".join([*_SAME.values(), *_IN_TOKENS.values(), *_SENTENCES.values()]).split()
    assert len(names) == len(set(names)) == len(TRANSLATED)
    assert not {key.name for key in KEYS} & set(names)


@given(steps=st.integers(1, 10**6), batch=st.integers(1, 64), context=st.integers(1, 4096))
def test_steps_and_sequences_are_converted_by_the_sizes_of_the_configuration(steps, batch, context):
    tree = {"train": {"batch": {"tokens": batch * context}}, "data": {"context": context}, "phases": [{"name": "pre"}]}
    (written_tokens,) = re.findall(r"phases\.pre\.tokens=([\d_]+)", example("max_steps", steps, tree))
    assert int(written_tokens) == steps * batch * context
    (written_tokens,) = re.findall(r"train\.batch\.tokens=([\d_]+)", example("batch_size", batch, tree))
    assert int(written_tokens) == batch * context


@pytest.mark.parametrize(("override", "message"), [
    ("max_steps=10", "The key max_steps is unknown. Here it is phases.NAME.tokens, in tokens. For 10 steps of 4,096 "
                     "tokens: phases.train.tokens=40_960."),
    ("train.max_steps=10", "The key train.max_steps is unknown. Here it is phases.NAME.tokens, in tokens."),
    ("data.suffixes=.txt, .md", "data.suffixes is '.txt, .md', but must be a list, such as [.txt, .md]."),
    ("warmup_ratio=0.1", "The key warmup_ratio is unknown. Set phases.NAME.schedule.warmup_tokens to that share of the "
                         "phase's tokens."),
    ("optimizer.lr=1", "The key optimizer.lr is unknown. Here it is optimizer.muon.learning_rate for matrices (of "
                       "attention, router and experts), optimizer.adamw.learning_rate for the rest (embedding, norms, "
                       "convolutions) and for adapters."),
])  # fmt: skip
def test_names_and_forms_of_other_libraries_are_refused_with_ours(override, message):
    assert refused_to_load(Path("configs/tiny.yaml"), override) == message
