"""Every command, as the parsers list them, with standard streams that are closed, unread, full or not its encoding."""

import argparse
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.streams_helpers import Call, Outcome, Streams, run, run_forked
from tests.train_helpers import compute_little, small_run
from zaya_jax.__main__ import COMMANDS
from zaya_jax.aegis.exit_codes import SupervisorExit
from zaya_jax.checkpoint.__main__ import main as checkpoint
from zaya_jax.completion import _parser
from zaya_jax.errors import ExitCode
from zaya_jax.run.checkpoints import saved_steps
from zaya_jax.run.run import open_run
from zaya_jax.train.fit import run_training

UNREAD = Streams(stdout="gone", encoding="ascii")
CLOSED = Streams("closed", "whole", "closed", "latin-1")
LOST = {"full": "No space left on device", "failing": "Input/output error", "unwritable": "It is not open for writing"}
LIGHT = ["phases.0.tokens=256", "model.num_layers=1", "model.attention=gqa", "model.router=linear",
         "model.residual_scaling=false", "optimizer.matrices=adamw", "train.batch.micro_batch=4",
         "sample.tokens=1"]  # fmt: skip
OTHERS = (Streams(), Streams("closed", "closed"), Streams("closed", "closed", "closed"),
          Streams("whole", "gone", "gone"), Streams(stdout="full"), Streams(stdout="full", stderr="full"),
          Streams(stdout="failing"), Streams(stdout="unwritable"),
          Streams(encoding="latin-1"), Streams(encoding="utf-16"))  # fmt: skip


def verbs(parser: argparse.ArgumentParser) -> Iterator[tuple[str, ...]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, verb in action.choices.items():
                yield from ((name, *rest) for rest in verbs(verb))
            return
    yield ()


MODULES = dict.fromkeys(module for (module, *_), _ in COMMANDS.values())
VERBS = [(module, *verb) for module in MODULES for verb in verbs(_parser(module))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run, its configuration, an export, and a run under a supervisor."""
    folder = tmp_path_factory.mktemp("streams")
    with pytest.MonkeyPatch.context() as patch:
        compute_little(patch)
        run_training(small_run(folder, "sample.tokens=0"))
    assert checkpoint(["export-hf", str(folder / "run"), str(folder / "export")]) == 0
    supervised = run(Call("zaya_jax.aegis", ["run", "--run-dir", str(folder / "supervised"), "--", "true"]))
    assert supervised.status == 0, supervised
    return folder


def command_lines(folder: Path, verb: tuple[str, ...]) -> list[tuple[list[str], int]]:
    """The help, a flag that does not exist, and what works and takes no long time, each with its exit status."""
    config, run_dir, export, supervised = (str(folder / name) for name in ("run.yaml", "run", "export", "supervised"))
    older, newer, new = f"{run_dir}/checkpoints/10", f"{run_dir}/checkpoints/12", str(folder / f"new{next(numbers)}")
    works = {
        ("main",): ["--config", config, "--print-config"],
        ("data", "prepare"): ["--input", f"{folder}/corpus", "--tokenizer", export, "--output", new, "--suffixes",
                              ".txt", "--workers", "1"],
        ("data", "describe"): [config],
        ("generate",): [run_dir, "--prompt", "naïve ☃", "--max-new-tokens", "2"],
        ("evaluate",): [run_dir, "--output", new],
        ("report",): [run_dir, "--output", f"{new}.html"],
        ("checkpoint", "ls"): [run_dir],
        ("checkpoint", "verify"): [run_dir, "--all"],
        ("checkpoint", "inspect"): [run_dir],
        ("checkpoint", "diff"): [newer, newer],
        ("checkpoint", "prune"): [run_dir, "--keep", "2"],
        ("checkpoint", "rollback"): [run_dir, "12"],
        ("checkpoint", "average"): [older, newer, "--output", new],
        ("checkpoint", "import-hf"): [export, "--output", new],
        ("checkpoint", "export-hf"): [run_dir, new],
        ("aegis", "run"): ["--run-dir", new, "--", "true"],
        ("aegis", "status"): [supervised],
        ("aegis", "report"): [supervised],
        ("machine", "describe"): [],
    }.get((verb[0].removeprefix("zaya_jax."), *verb[1:]))  # fmt: skip
    wrong = SupervisorExit.CONFIGURATION if verb[1:] == ("run",) else ExitCode.BAD_INPUT
    lines = [(["--help"], 0), (["--no-such-flag"], wrong), *([] if works is None else [(works, 0)])]
    return [([*verb[1:], *line], status) for line, status in lines]


numbers = count()


def check(call: Call, outcome: Outcome, status: int) -> None:
    """The command ends as it does with other streams, and says in a sentence what cannot be printed."""
    text = outcome.out + outcome.err
    assert "Traceback" not in text, (call, text)
    assert "Exception" not in text, (call, text)
    is_lost = call.streams.stdout in LOST and status in (ExitCode.OK, ExitCode.STOPPED)
    if is_lost and call.streams.stderr == "whole" and "run" not in call.arguments:  # a supervisor prints to stderr
        assert f"standard output is lost: {LOST[call.streams.stdout]}." in outcome.err, (call, outcome)
    assert outcome.status in {status, ExitCode.STOPPED if is_lost else status}, (call, outcome)


@pytest.fixture(scope="module")
def outcomes(folder):
    """The calls of each verb with their exit statuses and what became of them."""
    calls = []
    for verb in VERBS:
        for streams, unneeded in ((UNREAD, "--no-such-flag"), (CLOSED, "--help")):  # which print nothing there
            calls += [(verb, Call(verb[0], line, streams), status) for line, status in command_lines(folder, verb)
                      if line[-1:] != [unneeded]]  # fmt: skip
    config, run_dir = str(folder / "run.yaml"), str(folder / "run")
    listed = ["ls", run_dir]
    calls += [(("typed",), Call("zaya_jax.generate", [run_dir, "-"]), ExitCode.BAD_INPUT),
              (("typed",), Call("zaya_jax.generate", [run_dir, "--chat", "--max-new-tokens", "1"]), 0),
              (("trained",), Call("zaya_jax.main", ["--config", config, f"run_dir={folder}/trained", *LIGHT],
                               Streams("closed", "closed", "closed")), 0),
              *((("lost",), Call("zaya_jax.checkpoint", line, Streams(stdout=kind)), ExitCode.STOPPED)
                for kind in LOST for line in (listed, ["--help"])),
              (("lost",), Call("zaya_jax.main", ["--config", config, "--print-config"], Streams(stdout="full")),
               ExitCode.STOPPED)]  # fmt: skip
    prepare = ["prepare", "--input", f"{folder}/corpus", "--suffixes", ".txt", "--tokenizer", f"{folder}/export",
               "--output", f"{folder}/none"]  # fmt: skip
    calls += [(("argument",), Call(f"zaya_jax.{module}", line), ExitCode.BAD_INPUT) for module, line in
              (("generate", [run_dir, "--prompt", "a\udcff"]), ("data", [*prepare, "--bos", "a\udcff"]),
               ("data", [*prepare, "--eot", "a\udcff"]))]  # fmt: skip
    ended = zip(calls, run_forked([call for _, call, _ in calls]), strict=True)
    return [(verb, call, status, outcome) for (verb, call, status), outcome in ended]


@pytest.mark.parametrize("verb", [*VERBS, ("typed",), ("trained",), ("lost",), ("argument",)], ids=" ".join)
def test_a_command_ends_with_its_status_and_no_traceback_though_streams_are_closed_or_unread(outcomes, verb):
    for its, call, status, outcome in outcomes:
        if its == verb:
            check(call, outcome, status)


def test_typed_bytes_that_are_no_text_are_named_and_a_conversation_goes_on(outcomes):
    prompt, chat = (outcome for verb, _, _, outcome in outcomes if verb == ("typed",))
    assert re.fullmatch("Error: Standard input is not utf-8: byte \\d+ cannot be read.\n", prompt.err)
    assert "Error: The message is not utf-8: byte " in chat.out
    assert "A new conversation." in chat.out


def test_arguments_that_are_no_text_are_named(outcomes):
    assert [outcome.err for verb, _, _, outcome in outcomes if verb == ("argument",)] == 3 * [
        "Error: The text cannot be encoded: its character at position 1 is an unpaired surrogate.\n"]  # fmt: skip


def test_training_without_standard_streams_finishes(outcomes, folder):
    run_folder = open_run(folder / "trained")
    assert run_folder.status.state == "finished"
    assert saved_steps(folder / "trained" / "checkpoints") == [2]


@pytest.mark.parametrize("module", MODULES)
def test_a_command_in_a_new_process_ends_as_its_fork_does(outcomes, module):
    call, forked = next((call, outcome) for verb, call, _, outcome in outcomes
                        if verb[0] == module and call.arguments[-1] == "--no-such-flag")  # fmt: skip
    assert run(call) == forked


@pytest.mark.soak
@pytest.mark.parametrize("streams", [UNREAD, CLOSED, *OTHERS], ids=" ".join)
@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_all_streams_of_a_command_in_a_new_process(folder, verb, streams):
    for line, status in command_lines(folder, verb):
        call = Call(verb[0], line, streams)
        check(call, run(call), status)
