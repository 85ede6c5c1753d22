"""Commands in the README and the pages of docs/ are accepted: by the parser of each, with their configuration."""

import importlib
import re
import shlex
import tomllib
from argparse import Namespace
from collections.abc import Callable, Iterator
from itertools import dropwhile
from pathlib import Path

import pytest

from tests.pages_helpers import PAGES, ROOT, shell_blocks
from zaya_jax.__main__ import COMMANDS
from zaya_jax.config import load_config
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.run.options import parse_training

SEPARATORS = {"|", "||", "&&", ";", "&"}
# Programs that are not ours. What they are given is not checked here, but for make and pip.
OTHERS = {"cat", "cd", "chgrp", "chmod", "cp", "curl", "docker", "echo", "eval", "exec", "git", "hf", "kubectl",
          "launch/ssh.sh", "make", "mkdir", "mpirun", "pip", "python", "python3", "register-python-argcomplete", "rm",
          "sbatch", "source", "srun", "tensorboard", "test", "umask", "vllm", "zaya"}  # fmt: skip


def lines(block: str) -> list[str]:
    """Return the commands of a block of a shell, without the text of here-documents."""
    block = re.sub(r"<<'?(\w+)'?\n.*?^\1$", "", block, flags=re.MULTILINE | re.DOTALL).replace("\\\n", " ")
    return [line for line in block.splitlines() if line.strip() and not line.startswith("#")]


def simple_commands(line: str) -> Iterator[list[str]]:
    """Yield the words of each command of a line, without variables, and of a command inside `bash -c '…'`."""
    lexer = shlex.shlex(re.sub(r"> *\S+", "", line), posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word in SEPARATORS:
            words = list(dropwhile(lambda word: re.match(r"\w+=", word), words))
            if words:
                yield words
            words = []
        elif " -m zaya_jax" in word:
            yield from simple_commands(re.sub(r"\$\w+", "1", word))
        else:
            words.append(word)


def calls(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the module and arguments of each of our commands in a command: also of one that a supervisor starts."""
    for index, word in enumerate(words):
        if word == "-m" and words[index + 1].startswith(("zaya_jax", "benchmarks")):
            yield words[index + 1], words[index + 2 :]
        elif word == "zaya" and len(words) > index + 1:
            module, *first = COMMANDS[words[index + 1]][0]
            yield module, [*first, *words[index + 2 :]]
        elif re.fullmatch(r"launch/\w+\.(sh|sbatch)", word):
            yield "zaya_jax.main", words[index + 1 + word.endswith(".sh") :]


COMMAND_LINES = [(page, line) for page, text in PAGES.items() for block in shell_blocks(text) for line in lines(block)]
CALLS = [
    (page, module, arguments)
    for page, line in COMMAND_LINES
    for words in simple_commands(line)
    for module, arguments in calls(words)
]


@pytest.fixture(scope="module")
def parse() -> Callable[[str, list[str]], Namespace]:
    """Return a function that parses the arguments of a module as its command does, and runs nothing."""

    def parse(module: str, arguments: list[str]) -> Namespace:
        if module == "zaya_jax.main":
            return parse_training(arguments)
        main = importlib.import_module(f"{module}.__main__")
        if hasattr(main, "_parser"):
            return main._parser().parse_args(arguments)
        with pytest.MonkeyPatch.context() as patch:
            user = "benchmarks.benchmark_command" if module == "benchmarks" else main.__name__
            patch.setattr(f"{user}.run_verb", lambda parser, arguments: parser.parse_args(arguments))
            return main.main(arguments)

    return parse


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Enter a folder with the shipped files, and those that the README writes."""
    for name in ("benchmarks", "configs", "docs", "launch", "zaya_jax"):
        (tmp_path / name).symlink_to(ROOT / name)
    (mine,) = re.findall(r"^cat > mine.yaml <<'END'\n(.*?)^END$", PAGES["README.md"], re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.yaml").write_text(mine)
    (tmp_path / "here").mkdir()  # measurements of docs/machine.md
    monkeypatch.chdir(tmp_path)


def test_commands_of_every_module_are_found():
    assert {module for _, module, _ in CALLS} == {"benchmarks", *(module for (module, *_), _ in COMMANDS.values())}
    assert ("docs/cluster.md", "zaya_jax.main") in {(page, module) for page, module, _ in CALLS}  # of mpirun
    assert len(COMMAND_LINES) > 100


@pytest.mark.parametrize(("page", "module", "arguments"), CALLS,
                         ids=[f"{page}: {module.removeprefix('zaya_jax.')} {' '.join(a)}" for page, module, a in CALLS]
                         )  # fmt: skip
def test_a_command_is_accepted(page, module, arguments, parse, clone):
    if "…" in " ".join(arguments):
        pytest.skip("abbreviated")
    parsed = parse(module, arguments)
    named = getattr(parsed, "config", None) or getattr(parsed, "path", None)
    if str(named).endswith(".yaml"):
        load_config(named, getattr(parsed, "overrides", None) or [])
    assert getattr(parsed, "compile_for", None) in (None, *HARDWARE) or set(parsed.compile_for) <= set(HARDWARE)
    hardware = getattr(parsed, "hardware", None)
    assert hardware in (None, *HARDWARE) or Path(hardware).is_dir()


def test_other_programs_are_known():
    programs = {words[0] for _, line in COMMAND_LINES for words in simple_commands(line)}
    assert programs - OTHERS - {name for name in programs if name.startswith(".venv")} == set()


def test_make_targets_and_extras_exist():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for page, line in COMMAND_LINES:
        for words in simple_commands(line):
            if words[0] == "make":
                assert words[1] in targets, (page, line)
            for extras in re.findall(r"\.\[([a-z,-]+)\]", line):
                assert set(extras.split(",")) <= set(project["optional-dependencies"]), (page, line)
