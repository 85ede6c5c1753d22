"""Tab completion of `zaya` in a real bash."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zaya_jax.__main__ import COMMANDS
from zaya_jax.config import flatten_keys, load_config, to_dict
from zaya_jax.config.loader import override_keys
from zaya_jax.config.shipped import shipped_names

ROOT = Path(__file__).parent.parent
BASH = shutil.which("bash")
REGISTER = Path(sys.executable).with_name("register-python-argcomplete")
# bash calls the function as it does after Tab, with a `zaya` that runs this clone and says whether it imported jax.
SCRIPT = """
eval "$("$REGISTER" zaya)"
for line in "$@"; do
    COMP_LINE=$line COMP_POINT=${#line} COMP_TYPE=9 COMPREPLY=()
    _python_argcomplete zaya
    echo "${COMPREPLY[*]}"
done
"""
ZAYA = f"""#!{sys.executable}
import atexit, sys
sys.path.insert(0, {str(ROOT)!r})
from zaya_jax.__main__ import main
import os
leave = os._exit
def check(status):
    leave(status if "jax" not in sys.modules else 99)
os._exit = check
main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completion")
    (folder / "zaya").write_text(ZAYA)
    (folder / "zaya").chmod(0o755)
    (folder / "mine.yaml").write_text("extends: configs/recipe_tiny.yaml\n")
    return folder


def candidates(folder: Path, *lines: str) -> list[list[str]]:
    """What bash offers after each line."""
    assert BASH
    environment = {"PATH": f"{folder}:{Path(BASH).parent}", "REGISTER": str(REGISTER)}
    done = subprocess.run([BASH, "--norc", "-c", SCRIPT, "bash", *lines], cwd=folder, env=environment, text=True,
                          capture_output=True, timeout=60, check=False)  # fmt: skip
    assert done.stderr == ""
    return [line.split() for line in done.stdout.splitlines()]


def test_commands_verbs_flags_files_and_keys_are_offered(folder):
    asked = {
        "zaya ": {*COMMANDS, "-h", "--help"},
        "zaya checkpoint ex": {"export-hf"},
        "zaya train --pr": {"--print-config", "--process", "--processes"},
        "zaya train --config ": {*shipped_names(), "mine.yaml"},
        "zaya train mi": {"mine.yaml"},
        "zaya train mine.yaml train.spike.": {"train.spike.window=", "train.spike.threshold="},
        "zaya evaluate runs --config configs/ev": {*shipped_names("evals")},
        "zaya data describe mi": {"mine.yaml"},
        "zaya train --config mine.yaml train.spike.": {"train.spike.window=", "train.spike.threshold="},
        # bash replaces what follows the last `=`.
        "zaya train --config mine.yaml train.compute_dtype=": {"float32", "bfloat16", "float64"},
        "zaya train seed=1 model.attention_bias=t": {"true"},
        "zaya data prepare --nothing-like-this": set(),
    }
    offered = candidates(folder, *asked)
    assert {line: set(words) for line, words in zip(asked, offered, strict=True)} == asked


def test_every_command_has_a_parser_that_imports_no_jax():
    code = ("import sys; from zaya_jax.__main__ import COMMANDS; from zaya_jax.completion import _parser; "
            "print(len([_parser(module).format_usage() for (module, *_), _ in COMMANDS.values()]), "
            "'jax' in sys.modules)")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(len(COMMANDS)), "False"], done.stderr


def test_the_keys_are_those_that_overrides_set():
    config = to_dict(load_config("configs/recipe_tiny.yaml"))
    keys = {key for key, _ in override_keys(config)}
    phases = {phase["name"]: phase for phase in config["phases"]}
    values = {key for key, value in flatten_keys({**config, "phases": phases}) if value != []}
    sections = {key.rpartition(".")[0] for key in keys}
    assert values - keys <= sections, "all but sections that are null"
    assert {"lora.rank", "profile.start", "phases.sft.schedule.shape"} <= keys
    assert len(dict(override_keys({}))) < len(keys)
