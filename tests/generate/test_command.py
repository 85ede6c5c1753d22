"""`python -m zaya_jax.generate` on a run, a phase, an export and bad input."""

import contextlib
import io
import re

import pytest

from tests.train_helpers import compile_once, on_devices, small_run
from zaya_jax.checkpoint.__main__ import main as checkpoint
from zaya_jax.generate import text
from zaya_jax.generate.__main__ import main
from zaya_jax.train.loop import run_training


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A trained run and its export."""
    folder = tmp_path_factory.mktemp("generate")
    with pytest.MonkeyPatch.context() as patch:
        compile_once(patch)
        config = small_run(folder)
        run_training(config)
    assert checkpoint(["export-hf", config.run_dir, str(folder / "export"), "--dtype", "float32"]) == 0
    return config.run_dir, str(folder / "export")


ARGUMENTS = ["--prompt", "the model", "--max-new-tokens", "6", "--temperature", "0"]


def test_every_kind_of_path_gives_the_same_text(run, capsys):
    folder, export = run
    paths = [folder, f"{folder}@train", export, f"hf:{export}"]
    printed = []
    for path in paths:
        assert main([path, *ARGUMENTS]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0].startswith("the model")
    assert len(printed[0]) > len("the model\n")
    assert len(set(printed)) == 1


def printed(*arguments):
    """What the command prints, and the sizes of the mesh that it generates on."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        meshes, compute = [], text.continuations

        def record(*arguments, placement, **options):
            meshes.append(dict(placement.mesh.shape))
            return compute(*arguments, placement=placement, **options)

        patch.setattr(text, "continuations", record)
        assert main(arguments) == 0
    return out.getvalue(), meshes


def test_several_devices_give_the_same_text(run, capsys):
    folder, _ = run
    main([folder, *ARGUMENTS])
    over = ["--data", "2", "--context", "2"]
    there, (mesh,) = on_devices(8, "tests.generate.test_command:printed", folder, *ARGUMENTS, *over)
    assert there == capsys.readouterr().out
    assert mesh == {"data": 2, "fsdp": 1, "expert": 1, "context": 2}


def test_prompts_come_from_flags_files_and_standard_input(run, tmp_path, capsys, monkeypatch):
    folder, _ = run
    main([folder, *ARGUMENTS])
    expected = capsys.readouterr().out
    (tmp_path / "prompt.txt").write_text("the model")
    assert main([folder, "--file", str(tmp_path / "prompt.txt"), *ARGUMENTS[2:]]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("the model"))
    assert main([folder, "-", *ARGUMENTS[2:]]) == 0
    assert capsys.readouterr().out == expected * 2


def test_samples_differ_by_their_seeds_and_repeat(run, capsys):
    folder, _ = run
    hot = [folder, "--prompt", "the model", "--max-new-tokens", "6", "--temperature", "2", "--samples", "2"]
    assert main(hot) == 0
    first = capsys.readouterr().out
    one, two = re.split("^=== 'the model'\n", first, flags=re.MULTILINE)[1:]
    assert one != two
    assert main([*hot[:-2], "--seed", "1"]) == 0
    assert capsys.readouterr().out == two
    assert main([*hot, "--logprobs"]) == 0
    rows = re.findall(r"^ +-[0-9.]+  ['\"]", capsys.readouterr().out, re.MULTILINE)
    assert 2 <= len(rows) <= 12


def test_a_conversation_in_the_terminal(run, capsys, monkeypatch):
    folder, _ = run
    said = iter(["the model", "/reset", "the rows"])

    def ask(prompt):
        print(prompt, end="")
        try:
            return next(said)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", ask)
    assert main([folder, "--chat", "--max-new-tokens", "4", "--system", "Be brief."]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Type a message.")
    assert out.count("> ") >= 4
    assert "A new conversation." in out


def test_a_message_goes_through_the_template_and_rsa_through_rounds(run, capsys):
    folder, _ = run
    message = [folder, "--message", "the model", "--max-new-tokens", "4"]
    assert main(message) == 0
    answer = capsys.readouterr().out
    assert not answer.startswith("the model")
    assert main([*message, "--rsa", "3", "2", "0", "2"]) == 0
    assert capsys.readouterr().out == answer  # without rounds, the first candidate
    assert main([*message, "--rsa", "3", "1", "1", "1"]) == 2  # the prompt of a round is longer than the positions
    assert "3 candidates" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere", "--prompt", "a"], "nowhere"),
        (["RUN"], "--prompt TEXT, --file FILE or -"),
        (["RUN", "def main"], "use --prompt 'def main'; to read standard input, use -."),
        (["RUN", "--prompt", "a", "--rsa", "2", "3", "1", "4"], "--rsa aggregated is 3"),
        (["RUN", "--chat", "--rsa", "2", "1", "1", "4"], "--rsa does not go with --chat"),
        (["RUN", "--prompt", "a", "--chat"], "exactly one of them"),
        (["RUN", "--prompt", "a", "--system", "b"], "--system is only for --chat and --message"),
        (["RUN", "--file", "nowhere.txt"], "--file nowhere.txt cannot be read"),
        (["RUN", "--prompt", "a", "--samples", "0"], "--samples is 0"),
        (["RUN", "--prompt", "a", "--context", "999"], "--data 1 × --context 999 is 999, but must be at most"),
        (["RUN", "--prompt", "a", "--data", "0"], "--data is 0, but must be at least 1"),
        (["RUN", "--prompt", "a", "--top-p", "1.5"], "--top-p is 1.5"),
        (["RUN", "--prompt", "a", "--stop", ""], "A stop string is empty"),
        (["RUN", "--prompt", "a", "--tokenizer", "nowhere"], "--tokenizer is 'nowhere'"),
        (["RUN", "--prompt", "a " * 500], "exceed model.max_positions"),
        (["RUN", "--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens is 0"),
    ],
)
def test_bad_input_is_one_sentence(run, arguments, said, capsys):
    assert main([run[0] if text == "RUN" else text for text in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("Error: ")
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out
