"""`python -m zaya_jax.generate` on a run, a phase, an export and bad input."""

import contextlib
import dataclasses
import functools
import io
import json
import re
import sys

import jax
import pytest

from tests.helpers import random_model
from tests.train_helpers import MODEL, on_devices
from tests.trained_helpers import trained_run
from zaya_jax.generate import source, text
from zaya_jax.generate.__main__ import main
from zaya_jax.generate.engine import Continuation

_open = functools.cache(source.open_text_model)


@pytest.fixture(autouse=True)
def open_once(monkeypatch):
    monkeypatch.setattr(source, "open_text_model", _open)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A trained run and its export."""
    trained = trained_run(tmp_path_factory.getbasetemp())
    return str(trained.folder), str(trained.export)


ARGUMENTS = ["--prompt", "the model", "--max-new-tokens", "6", "--temperature", "0"]


def test_every_kind_of_path_and_of_prompt_gives_the_same_text(run, tmp_path, capsys, monkeypatch):
    folder, export = run
    (tmp_path / "prompt.txt").write_text("the model")
    monkeypatch.setattr("sys.stdin", io.StringIO("the model"))
    printed = []
    for arguments in ([folder, *ARGUMENTS], [f"{folder}@train", *ARGUMENTS], [export, *ARGUMENTS],
                      [f"hf:{export}", *ARGUMENTS], [folder, "--file", str(tmp_path / "prompt.txt"), *ARGUMENTS[2:]],
                      [folder, "-", *ARGUMENTS[2:]]):  # fmt: skip
        assert main(arguments) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0].startswith("the model")
    assert len(printed[0]) > len("the model\n")
    assert len(set(printed)) == 1


def test_weights_are_computed_with_in_the_dtype_that_is_asked_for(run):
    folder, _ = run
    opened = _open(folder, "bfloat16")
    assert {x.dtype.name for x in jax.tree.leaves(opened.model)} == {"bfloat16", "float32"}
    assert opened.model.dtype == "bfloat16"
    assert _open(folder).model.dtype == "float32"


# --- what the model writes, by a stand-in ----------------------------------------------------------------------


@pytest.fixture
def opened(run, monkeypatch):
    """What the command opens: the run's tokenizer, and a model with positions for a conversation."""
    larger = random_model(dataclasses.replace(MODEL, max_positions=512))
    opened = _open(run[0])._replace(model=larger)
    monkeypatch.setattr(source, "open_text_model", lambda *_: opened)
    return opened


@pytest.fixture
def calls(opened, monkeypatch):
    """Calls of `continuations`, each of whose rows writes four tokens: seed + 40, one more, and so on."""
    calls = []

    def continuations(_model, rows, most, sampling, *, seeds, **options):
        calls.append({"rows": rows, "most": most, "sampling": sampling, "seeds": list(seeds), **options})
        tokens = [[seed + 40 + index for index in range(4)] for seed in seeds]
        for count in (2, 4):
            yield [Continuation(row[:count], [-0.5, -1.25, -2.0, -3.0][:count], stopped=False) for row in tokens]

    monkeypatch.setattr(text, "continuations", continuations)
    return calls


def written(opened, seed):
    """The text that the stand-in writes."""
    return opened.tokenizer.decode([seed + 40 + index for index in range(4)])


def sizes_and_devices(*arguments):
    """The sizes of the mesh that the command generates on, and the devices that hold the model."""
    seen = []

    def record(engine, *_, **__):
        leaves, _ = engine._compiled
        seen.append((dict(engine.placement.mesh.shape), [len(x.sharding.device_set) for x in leaves]))
        yield [Continuation([], [], stopped=True)]

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(text, "continuations", record)
        assert main(arguments) == 0
    return seen


def test_several_devices_are_those_of_the_flags(run):
    over = ["--data", "2", "--context", "2"]
    ((mesh, devices),) = on_devices(8, "tests.generate.test_command:sizes_and_devices", run[0], *ARGUMENTS, *over)
    assert mesh == {"data": 2, "fsdp": 1, "expert": 1, "context": 2}
    assert set(devices) == {4}


def test_samples_have_seeds_of_their_own_and_flags_set_how_they_are_drawn(opened, calls, capsys):
    prompt = ["RUN", "--prompt", "the model", "--seed", "3", "--max-new-tokens", "6"]
    drawn = ["--temperature", "2", "--top-k", "5", "--top-p", "0.9", "--min-p", "0.1", "--repetition-penalty", "1.5"]
    assert main([*prompt, "--samples", "2", *drawn]) == 0
    assert capsys.readouterr().out == "".join(f"=== 'the model'\nthe model{written(opened, seed)}\n" for seed in (3, 4))
    (call,) = calls
    assert call["seeds"] == [3, 4]
    assert call["rows"][0] == call["rows"][1]
    assert call["most"] == 6
    assert tuple(call["sampling"]) == (2.0, 5, 0.9, 0.1, 1.5)
    assert main([*prompt, "--stop", written(opened, 3)[2:]]) == 0  # in what is printed, too
    assert capsys.readouterr().out == f"the model{written(opened, 3)[:2]}\n"
    assert calls[1]["sampling"].temperature == 0.8
    assert main([*prompt, "--logprobs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "=== 'the model'"
    assert [line.split()[0] for line in lines[1:]] == ["-0.5000", "-1.2500", "-2.0000", "-3.0000"]
    assert "".join(line.split("  ")[-1].strip("'") for line in lines[1:]) == written(opened, 3)


def typed(monkeypatch, *lines):
    """Type lines into the terminal, then end the input."""
    inputs = iter(lines)

    def ask(prompt):
        print(prompt, end="")
        try:
            return next(inputs)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", ask)


CHAT = ["RUN", "--chat", "--max-new-tokens", "4"]


def test_a_conversation_in_the_terminal(opened, calls, capsys, monkeypatch):
    typed(monkeypatch, "the model", "", "/reset", "the rows")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main([*CHAT, "--system", "Be brief."]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("Type a message, or /help.")
    assert lines[1:] == [f"> {written(opened, 0)}", "> > A new conversation.", f"> {written(opened, 1)}", "> "]
    assert [call["most"] for call in calls] == [4, 4]
    assert len(re.findall(r"^\[4 tokens, [\d.]+ tokens/s\]$", err, re.M)) == 2


def test_commands_change_save_and_continue_a_conversation(opened, calls, capsys, monkeypatch, tmp_path):
    tool, file = {"type": "function", "function": {"name": "add", "parameters": {}}}, tmp_path / "chat.json"
    (tmp_path / "tools.json").write_text(json.dumps([tool]))
    typed(
        monkeypatch,
        "/help",
        f"/tools {tmp_path}/tools.json",
        "/system Be kind.",
        "the model",
        f"/save {file}",
        f"/save {file}",
        "/system",
        "/tools",
        "the rows",
    )
    assert main(CHAT) == 0
    out = capsys.readouterr().out
    assert all(
        f"\n{command}" in out for command in ("/reset ", "/system TEXT ", "/tools FILE ", "/save FILE ", "Ctrl-D ")
    )
    assert out.index("Tools: 1.") < out.index("Tools: 0.")
    assert out.count(f"Saved 3 messages to {file}.") == 2  # a conversation may replace itself
    system, asked, answer = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "the model"},
        {"role": "assistant", "content": written(opened, 0)},
    ]
    assert json.loads(file.read_text()) == {"messages": [system, asked, answer], "tools": [tool]}
    assert file.read_text().count("\n") == 1  # JSON Lines, which `prepare` reads
    first, second = (opened.tokenizer.decode(call["rows"][0]) for call in calls)
    assert '"name": "add"' in first
    assert "Be kind." in first
    assert not {'"name": "add"', "Be kind."} & {part for part in ('"name": "add"', "Be kind.") if part in second}
    typed(monkeypatch, f"/load {file}", "the rows", f"/save {file}", f"/save {tmp_path}/tools.json")
    assert main(CHAT) == 0
    out = capsys.readouterr().out
    assert f"Continuing {file}: 3 messages." in out
    assert f"Error: {tmp_path}/tools.json exists. Choose another name" in out
    assert len(json.loads(file.read_text())["messages"]) == 5
    continued = opened.tokenizer.decode(calls[2]["rows"][0])
    assert continued.startswith(first)
    assert f"{written(opened, 0)}<|im_end|>" in continued


def test_a_conversation_without_tools_is_continued(opened, calls, capsys, monkeypatch, tmp_path):
    saved, bare, cut = tmp_path / "saved.json", tmp_path / "bare.json", tmp_path / "cut.json"
    typed(monkeypatch, "the model", f"/save {saved}")
    assert main(CHAT) == 0
    record = json.loads(saved.read_text())
    assert list(record) == ["messages"]
    bare.write_text(json.dumps(record["messages"]))
    cut.write_text(saved.read_text()[:-9])
    typed(monkeypatch, *(f"/load {file}" for file in (saved, cut, bare)), "the rows")
    capsys.readouterr()
    assert main(CHAT) == 0
    lines = [line.removeprefix("> ") for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if line.startswith("Continuing")] == [
        f"Continuing {file}: 2 messages." for file in (saved, bare)
    ]
    assert sum(line.startswith(f"Error: {cut} ") for line in lines) == 1
    assert "user\nthe model" in opened.tokenizer.decode(calls[-1]["rows"][0])


def test_commands_that_are_wrong_say_so_and_the_conversation_goes_on(opened, calls, capsys, monkeypatch, tmp_path):
    (tmp_path / "a").write_text(
        json.dumps([{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "a"}])
    )
    (tmp_path / "b").write_text('{"rows": 1}')
    typed(
        monkeypatch,
        "/tolls x",
        "/save",
        f"/save {tmp_path}/c",
        f"/load {tmp_path}/a",
        f"/load {tmp_path}/b",
        f"/tools {tmp_path}/b",
        f"/tools {tmp_path}/c",
        "/etc/hosts is what?",
        f"/save {tmp_path}/c/d",
    )
    assert main(CHAT) == 0
    errors = [line for line in capsys.readouterr().out.splitlines() if "Error: " in line]
    messages = [
        "There is no command /tolls",
        "/save needs a file",
        "There is no answer yet",
        "The conversation has '<|im_end|>'",
        "This is no conversation: ",
        "These are no tools: ",
        "c cannot be read",
        "c/d cannot be written",
    ]
    assert len(errors) == len(messages)
    assert all(message in error for message, error in zip(messages, errors, strict=True))
    assert len(calls) == 1


def test_an_unfinished_character_is_never_shown(opened, capsys, monkeypatch):
    whole = opened.tokenizer.encode("the é")
    cut = next(size for size in range(len(whole)) if opened.tokenizer.decode(whole[:size]).endswith("\ufffd"))

    def continuations(*_, **__):
        yield [Continuation(whole[:cut], [0.0] * cut, stopped=False)]

    monkeypatch.setattr(text, "continuations", continuations)
    typed(monkeypatch, "the model")
    assert main(["RUN", "--chat", "--max-new-tokens", str(cut)]) == 0
    assert "> the \n" in capsys.readouterr().out


def test_what_stops_an_answer_does_not_end_the_conversation(opened, monkeypatch, capsys):
    inputs = [KeyboardInterrupt, "the model", "the " * 600]

    def ask(_):
        if inputs[-1] is KeyboardInterrupt:
            raise inputs.pop()
        return inputs.pop()

    def interrupted(*_, **__):
        yield [Continuation([40, 41], [0.0, 0.0], stopped=False)]
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr(text, "continuations", interrupted)
    assert main(["RUN", "--chat"]) == 0
    too_long, cut, last = capsys.readouterr().out.splitlines()[1:]
    assert too_long.startswith("Error: The conversation has ")
    assert cut == f"{opened.tokenizer.decode([40, 41])} …"
    assert last == ""


def test_a_message_goes_through_the_template_and_rsa_through_rounds(opened, calls, capsys):
    tokenizer = opened.tokenizer
    message = ["RUN", "--message", "the model", "--max-new-tokens", "4"]
    assert main([*message, "--system", "Be brief."]) == 0
    assert capsys.readouterr().out == f"{written(opened, 0)}\n"
    (asked,) = calls[0]["rows"]
    assert tokenizer.decode(asked).endswith("user\nthe model<|im_end|>\n<|im_start|>assistant\n")
    assert "system\nBe brief." in tokenizer.decode(asked)
    assert main([*message, "--rsa", "3", "2", "1", "2", "--seed", "5"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{written(opened, 8)}\n"  # the first candidate of the last round
    assert [line for line in captured.err.splitlines() if "candidates" in line] == ["3 candidates", "6 candidates"]
    assert [call["seeds"] for call in calls[1:]] == [[5, 6, 7], [8, 9, 10]]
    assert "Attempt 2:" in tokenizer.decode(calls[2]["rows"][0])


def test_what_ends_a_candidate_is_not_in_the_next_rounds_prompts(opened, calls):
    end = written(opened, 1)[-2:]
    assert main(["RUN", "--message", "a", "--rsa", "2", "2", "1", "4", "--seed", "1", "--stop", end]) == 0
    first, second = (opened.tokenizer.decode(call["rows"][0]) for call in calls)
    assert second.count("Attempt ") == 2
    assert end not in first
    assert end not in second


@pytest.mark.parametrize(
    ("arguments", "message"),
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
        (
            ["RUN", "--message", "a", "--rsa", "3", "1", "1", "1", "--max-new-tokens", "50"],
            "exceed model.max_positions",
        ),
    ],
)
def test_bad_input_is_one_sentence(run, arguments, message, capsys):
    assert main([run[0] if text == "RUN" else text for text in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("Error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out
