"""README.md does what it says: its Python runs, its commands are accepted; links and keys of all pages exist."""

import dataclasses
import re
import shlex
import tomllib
from pathlib import Path
from unittest.mock import Mock, create_autospec

import pytest

import zaya_jax
from tests.data_helpers import small_tokenizer
from zaya_jax.checkpoint.__main__ import _parser as checkpoint_parser
from zaya_jax.config import load_config
from zaya_jax.config.parallel import axis_sizes
from zaya_jax.config.stages import stages
from zaya_jax.data.__main__ import __file__ as data_main_file
from zaya_jax.data.__main__ import _parser as data_parser
from zaya_jax.data.__main__ import main as data
from zaya_jax.evaluate.__main__ import _parser as evaluate_parser
from zaya_jax.evaluate.heldout import HeldoutLoss
from zaya_jax.generate.__main__ import _parser as generate_parser
from zaya_jax.generate.engine import Continuation
from zaya_jax.main import main
from zaya_jax.report.__main__ import _parser as report_parser
from zaya_jax.run.checkpoints import CHECKPOINTS, PHASES
from zaya_jax.run.folder import CONFIG, METRICS, STATUS, TIMINGS
from zaya_jax.run.tokenizer import TOKENIZER_FOLDER
from zaya_jax.train.fit import TrainResult

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
IN_A_RUN = {CONFIG, METRICS, TIMINGS, PHASES, STATUS, f"{CHECKPOINTS}/", f"{TOKENIZER_FOLDER}/", "loss.png"}
NOT_IN_EACH_RUN = {"changes.jsonl", "summary.json"}  # of settings that change, and of the command
OF_A_READER = {"mine.yaml", "tokenizer.json", "benchmarks/gpu/DEVICE.json"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


HEREDOC = re.compile(r"^([^\n]*)<<'END'\n(.*?)^END$\n", re.MULTILINE | re.DOTALL)
COMMANDS = [line for block in blocks("bash") for line in HEREDOC.sub("", block).splitlines()]
((_, WRITE_DATA), (_, MINE)) = [found for block in blocks("bash") for found in HEREDOC.findall(block)]
(LAID_OUT,) = blocks("yaml")
# Code in the text, outside of blocks.
NAMED = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL))


def commands(start: str) -> list[list[str]]:
    """The arguments after `start` of each command, and of each command in the text, that begins so."""
    result = [shlex.split(line)[len(start.split()) :] for line in [*COMMANDS, *NAMED] if line.startswith(start)]
    assert result, start
    return result


def test_every_command_is_of_a_kind_that_is_checked_here():
    kinds = ("make ", "python -m zaya_jax.main ", "python -m zaya_jax.data ", "python -m zaya_jax.checkpoint ",
             "python -m zaya_jax.generate ", "python -m zaya_jax.evaluate ", "python -m zaya_jax.report ",
             "python -m zaya_jax.config ", "source .venv/bin/activate", "mkdir -p data", "rm -rf runs/",
             "echo ")  # fmt: skip
    assert [line for line in COMMANDS if not line.startswith(kinds)] == []


def test_the_python_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """But for its training and generation: tests/soak/test_docs.py runs them, and pastes twice."""
    result = Mock(spec_set=[field.name for field in dataclasses.fields(TrainResult)], heldout=HeldoutLoss(2.5, 2))
    train = create_autospec(zaya_jax.run_training, return_value=result)
    generate = create_autospec(zaya_jax.generate_tokens, return_value=[Continuation([1, 2], [-1.0, -1.0], False)])
    monkeypatch.setattr(zaya_jax, "run_training", train)
    monkeypatch.setattr(zaya_jax, "generate_tokens", generate)
    for name in ("configs", "zaya_jax"):  # what it reads, beside which it may write `runs/`
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    assert blocks("python")
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)  # noqa: S102
    shape, *rows, loss = capsys.readouterr().out.splitlines()
    assert shape == "(1, 4, 512)"
    assert rows == ["[1, 2]"] * 2
    assert loss.startswith("1.25 ")
    assert [call.args[1].shape for call in generate.call_args_list] == [(1, 4)] * 2
    ((config,), _) = train.call_args
    assert (config.run_dir, stages(config)[-1].end) == ("runs/short", 4)


def test_the_layouts_shown_are_those_of_the_devices_that_are_asked_for(tmp_path: Path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "laid_out.yaml").write_text(LAID_OUT)
    config = load_config(tmp_path / "laid_out.yaml")
    (devices,) = {int(line[line.index("--devices") + 1]) for line in commands("python -m zaya_jax.main")
                  if "--devices" in line}  # fmt: skip
    for index, phase in enumerate(config.phases):
        sizes = axis_sizes(config.parallel_for(phase), devices)
        sequences = [stage.sequences for stage in stages(config) if stage.phase == index]
        assert all(count % (devices // sizes["context"]) == 0 for count in sequences), phase.name
    assert config.parallel_for(config.phases[0]).fsdp == 8
    assert config.parallel_for(config.phases[-1]).context == 8


@pytest.mark.parametrize("arguments", commands("python -m zaya_jax.main"), ids=" ".join)
def test_training_commands_are_accepted(arguments: list[str], tmp_path, monkeypatch: pytest.MonkeyPatch, capsys):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "mine.yaml").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "--print-config"]) == 0
    assert "num_experts" in capsys.readouterr().out


def test_the_data_commands_prepare_and_describe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    for name in ("configs", "zaya_jax"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "mine.yaml").write_text(MINE)
    (tmp_path / "data").mkdir()
    trained = tmp_path / "runs" / "tiny" / "tokenizer"
    trained.mkdir(parents=True)
    small_tokenizer().save(trained / "tokenizer.json")
    monkeypatch.chdir(tmp_path)
    exec(compile(WRITE_DATA, "README.md", "exec"), {})  # noqa: S102
    for arguments in commands("python -m zaya_jax.data"):
        alone = ["--workers", "1"] if arguments[0] == "prepare" else []  # in this process
        assert data([*arguments, *alone]) == 0
    assert not (tmp_path / "runs" / "mine").exists()  # describing a run is not starting it
    text = capsys.readouterr().out
    assert "data/notes is complete." in text
    assert "[[It is " in text


def test_the_manual_shows_a_configuration_and_commands_that_are_accepted(tmp_path: Path):
    manual = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```yaml\n(.*?)^```$", manual, re.MULTILINE | re.DOTALL)
    path = tmp_path / "shown.yaml"
    path.write_text(f"extends: {ROOT / 'configs' / 'zaya1_8b.yaml'}\n{shown}")
    config = load_config(path)
    assert [config.context_for(phase) for phase in config.phases] == [4096, 32768]
    sizes = [(stage.phase, stage.tokens) for stage in stages(config)]
    assert sizes == [*((0, size * 2**20) for size in (1, 2, 3, 4)), (1, 4 * 2**20)]
    for override in re.findall(r"`(phases\.[^`]*=[^`]*)`", manual):
        assert load_config(path, [override]) != config
    for line in re.findall(r"^python -m zaya_jax.data (.*)$", manual, re.MULTILINE):
        data_parser().parse_args(shlex.split(line))
    assert set(re.findall(r"`(--[a-z-]+)", manual)) <= set(re.findall(r"--[a-z-]+", Path(data_main_file).read_text()))


def test_the_benchmark_has_the_command_it_is_said_to_have(capsys):
    from benchmarks.__main__ import main as bench

    for arguments in commands("python -m benchmarks"):
        with pytest.raises(SystemExit) as stop:
            bench([*arguments, *(() if "--help" in arguments else ("--help",))])
        assert stop.value.code == 0
        assert "--output" in capsys.readouterr().out


def test_checkpoint_commands_are_accepted():
    for arguments in commands("python -m zaya_jax.checkpoint"):
        assert checkpoint_parser().parse_args(arguments).verb == arguments[0]


def test_generate_commands_are_accepted():
    for arguments in commands("python -m zaya_jax.generate"):
        assert generate_parser().parse_args(arguments).path.startswith("runs/")


def test_evaluate_commands_are_accepted():
    for arguments in commands("python -m zaya_jax.evaluate"):
        evaluate_parser().parse_args(arguments)
    for arguments in commands("python -m zaya_jax.report"):
        report_parser().parse_args(arguments)


def test_make_targets_exist():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for target, *variables in commands("make "):
        assert target in targets
        assert all(variable == "GPU=" or variable.startswith("PYTEST_ARGS=tests/") for variable in variables)
        assert all((ROOT / variable.partition("=")[2]).exists() for variable in variables)


def test_extras_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {extra for name in [*COMMANDS, *NAMED] for extra in re.findall(r"\.?\[([a-z]+)\]", name)}
    assert named >= {"cuda", "rocm", "notebooks"}
    assert named <= set(project["optional-dependencies"])


def test_files_and_links_exist():
    links = [link.partition("#")[0] for link in re.findall(r"\]\(((?!https:)[^)]+)\)", README)]
    listed = [
        line.split()[0] for block in blocks("none") for line in block.splitlines() if line.startswith("zaya_jax/")
    ]
    named = [name for name in NAMED if re.fullmatch(r"[\w./]+(\.(py|yaml|toml|md|jsonl?|png|svg|ipynb)|/)", name)]
    assert {"docs/loss.png", "zaya_jax/main.py", "configs/zaya1_8b.yaml"} <= {*links, *listed, *named}
    paths = {*links, *listed, *named} - IN_A_RUN - NOT_IN_EACH_RUN - OF_A_READER - {""}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
