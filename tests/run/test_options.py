"""A training command names its configuration with or without --config, and texts name commands as they were typed."""

import argparse
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.__main__ import COMMANDS, main
from zaya_jax.completion import _parser
from zaya_jax.config import load_config
from zaya_jax.config.shipped import shipped
from zaya_jax.errors import InputError
from zaya_jax.run import typed_name as typed_name_module
from zaya_jax.run.command_output import run_command
from zaya_jax.run.options import parse_training
from zaya_jax.run.typed_name import TYPED, typed_name

FILES = st.sampled_from(["configs/tiny.yaml", "a.yml", "runs/lr=0.1/config.yaml", "../a b/ü.yaml"])
OVERRIDES = st.lists(st.sampled_from(["seed=1", "run_dir=runs/a.yaml", "data.sources.a/b.weight=2", "init_from=x.yml"]))
FLAGS = st.lists(st.sampled_from(["--json", "--print-config", "--devices=3"]), unique=True)


@given(st.data(), FILES, OVERRIDES, FLAGS)
def test_the_configuration_may_stand_anywhere_with_or_without_its_flag(data, file, overrides, flags):
    rest = data.draw(st.permutations([*overrides, *flags]))
    place, flag = data.draw(st.integers(0, len(rest))), data.draw(st.sampled_from([[], ["--config"]]))
    options = parse_training([*rest[:place], *flag, file, *rest[place:]])
    assert options.config == file
    assert options.overrides == [text for text in rest if text in overrides]
    assert (options.json, options.print_config) == ("--json" in flags, "--print-config" in flags)


def test_a_configuration_without_suffix_is_one_unless_another_is_named(capsys):
    assert parse_training(["runs/tiny", "seed=1"]).config == "runs/tiny"
    options = parse_training(["--config", "a.yaml", "sed"])
    assert (options.config, options.overrides) == ("a.yaml", ["sed"])  # which `load_config` refuses
    for words in (["a.yaml", "--config", "b.yaml"], ["a.yaml", "b"], ["a.yaml", "a.yaml"]):
        with pytest.raises(SystemExit, match="2"):
            parse_training(words)
        assert "2 configurations are named (" in capsys.readouterr().err


@pytest.fixture
def typed(monkeypatch):
    """As in the process that `zaya` becomes."""
    monkeypatch.setenv(TYPED, "zaya")
    typed_name_module._typed.cache_clear()
    yield
    typed_name_module._typed.cache_clear()


def parsers(parser):
    """A parser and those of its verbs."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from parsers(verb)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "doctor"])  # which is a verb of machine
@pytest.mark.usefixtures("typed")
def test_every_usage_help_and_error_has_the_name_that_was_typed(command, capsys):
    for parser in parsers(_parser(COMMANDS[command][0][0])):
        assert parser.format_usage().startswith(f"usage: zaya {command} ")
        assert "python -m zaya_jax" not in " ".join(parser.format_help().split())
        with pytest.raises(SystemExit):
            parser.error("Wrong.")
        assert f"\nzaya {command}" in capsys.readouterr().err
    assert TYPED not in os.environ  # of what the command starts


@pytest.mark.parametrize(("typed_as", "words", "name"), [
    ("zaya doctor", ["doctor"], "zaya doctor"), ("zaya", ["doctor"], "zaya machine doctor"),
    ("zaya", ["memory"], "zaya machine memory"),
    ("python -m zaya_jax doctor", ["doctor"], "python -m zaya_jax doctor"),
])  # fmt: skip
@pytest.mark.usefixtures("typed")
def test_help_and_errors_of_a_verb_have_its_name_as_it_was_typed(typed_as, words, name, monkeypatch, capsys):
    monkeypatch.setenv(TYPED, typed_as)
    for flag in ("--help", "--bogus"):
        with pytest.raises(SystemExit):
            _parser("zaya_jax.machine").parse_args([*words, flag])
    output = "".join(capsys.readouterr())
    assert output.count(f"usage: {name} [-h]") == 2
    assert f"\n{name}: error: unrecognized arguments: --bogus" in output


@pytest.mark.parametrize(("module", "words", "message"), [
    ("main", ["--lr", "0.1"], "--lr. Here it is optimizer.muon.learning_rate for matrices"),
    ("main", ["--weight-decay", "0.1"], "An override is written KEY=VALUE, without dashes.\n"),
    ("main", ["--dropout", "0.1"], "ends a run that overfits.\n"),
    ("main", ["--data.sources.a-b.path", "x"], "An override has no dashes: data.sources.a-b.path=VALUE.\n"),
    ("main", ["--run-dir", "x"], "An override has no dashes: run_dir=VALUE.\n"),
    ("aegis", ["drill", "--faults", "5", "--", "--config", "a.yaml"], "are required: --folder\n"),
    ("data", ["prepare", "--input", "a", "--tokenizer", "b", "--outdir", "X"], "--outdir is unknown."),
    ("data", ["prepare", "--inp", "a", "--tokenizer", "b"], "are required: --output\n"),
])  # fmt: skip
def test_a_flag_that_is_unknown_is_named_with_what_is_meant(module, words, message, capsys):
    with pytest.raises(SystemExit):
        _parser(f"zaya_jax.{module}").parse_args(words)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("module", "words", "flag"), [
    ("evaluate", ["run"], "--output"), ("evaluate", ["run"], "--config"), ("report", ["run"], "--output"),
    ("checkpoint", ["average", "run"], "--output"), ("machine", ["memory"], "--png"),
])  # fmt: skip
def test_a_path_may_begin_with_the_home_folder_after_any_flag(module, words, flag):
    parser = _parser(f"zaya_jax.{module}")
    for word in ("~", "~/a b", "~/ü/x.json", "/~/x", "x~", "a/~"):
        for typed_flag in ([flag, word], [f"{flag}={word}"]):
            options = parser.parse_args([*words, *typed_flag])
            assert str(getattr(options, flag.removeprefix("--"))) == os.path.expanduser(word)


def test_only_what_is_a_path_begins_with_the_home_folder():
    assert _parser("zaya_jax.checkpoint").parse_args(["ls", "~/run"]).run_dir == Path.home() / "run"
    assert _parser("zaya_jax.generate").parse_args(["run", "--prompt=~"]).prompt == ["~"]


def test_a_configuration_may_lie_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text(f"extends: {shipped('tiny.yaml')}\nseed: 7\n")
    assert load_config("~/mine.yaml").seed == 7


@pytest.mark.usefixtures("typed")
def test_hints_have_the_name_that_was_typed(capsys):
    def refuse():
        raise InputError("Run python -m zaya_jax.data merge x, then python -m zaya_jax.main a.yaml.")

    assert run_command(refuse) == 2
    assert capsys.readouterr().err == "Error: Run zaya data merge x, then zaya train a.yaml.\n"


def test_without_zaya_the_name_is_that_of_the_module(monkeypatch):
    assert typed_name("python -m zaya_jax.main") == "python -m zaya_jax.main"
    replaced = []
    for program in ("/usr/bin/zaya", "/x/zaya_jax/__main__.py"):
        monkeypatch.setattr("sys.argv", [program])
        main(["train"], lambda *arguments: replaced.append(arguments))
    assert [environment[TYPED] for _, _, environment in replaced] == ["zaya", "python -m zaya_jax"]
    # The installed command imports nothing from the current folder.
    assert [arguments[1:-1] for _, arguments, _ in replaced] == [["-P", "-m"], ["-m"]]
