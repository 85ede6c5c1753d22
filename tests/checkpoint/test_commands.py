import re
import shlex

import pytest
import yaml

from tests.checkpoint.saved_helpers import flip, save_run
from tests.train_helpers import ROOT
from zaya_jax.checkpoint import __main__ as module
from zaya_jax.checkpoint.__main__ import main
from zaya_jax.checkpoint.commands import list_run, size_text
from zaya_jax.config import load_config
from zaya_jax.errors import InputError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three checkpoints, that of step 2 pinned and that of step 3 damaged."""
    folder = save_run(tmp_path_factory.mktemp("run"), [1, 2, 3], {2: 1.5})
    (folder / "checkpoints" / "2" / "PINNED").touch()
    flip(folder / "checkpoints" / "3")
    (folder / "checkpoints" / "0.corrupt-20260101T000000").mkdir()
    return folder


def said(capsys, *arguments):
    status = main([str(one) for one in arguments])
    return status, capsys.readouterr()


def test_ls_has_a_line_for_each(run, capsys):
    status, text = said(capsys, "ls", run)
    lines = text.out.splitlines()
    assert status == 0
    assert [line.split()[0] for line in lines[1:4]] == ["1", "2", "3"]
    assert "1.5000" in lines[2]
    assert lines[2].endswith("pinned")
    assert lines[4] == "set aside: 0.corrupt-20260101T000000"


def test_verify_names_what_is_damaged_and_ends_with_one(run, capsys):
    status, text = said(capsys, "verify", run / "checkpoints" / "1")
    assert (status, "is what was saved (5 arrays" in text.out) == (0, True)
    status, text = said(capsys, "verify", run)
    assert status == 1
    assert "checkpoints/3" in text.out
    status, text = said(capsys, "verify", "--all", run)
    assert status == 1
    assert text.out.count("is what was saved (5 arrays") == 2


def test_inspect_gives_norms(run, capsys):
    status, text = said(capsys, "inspect", run / "checkpoints" / "2")
    assert status == 0
    (line,) = [line for line in text.out.splitlines() if line.startswith("balance.")]
    assert line.split()[1:] == ["float32", "2×4", f"{(8 * 4) ** 0.5:.6g}", "2"]


def test_diff_is_empty_for_equal_ones_alone(run, capsys, tmp_path):
    assert said(capsys, "diff", run / "checkpoints" / "1", run / "checkpoints" / "1") == (0, ("They are equal.\n", ""))
    status, text = said(capsys, "diff", run / "checkpoints" / "1", run / "checkpoints" / "2")
    assert status == 1
    assert "step: largest difference 1," in text.out
    other = save_run(tmp_path, [1], seed=5)
    status, text = said(capsys, "diff", run / "checkpoints" / "1", other)
    assert (status, text.out) == (1, "seed: 0 and 5\n")


@pytest.mark.parametrize("verb", ["ls", "verify", "inspect"])
def test_what_is_no_run_is_refused(verb, tmp_path, capsys):
    status, text = said(capsys, verb, tmp_path / "nothing")
    assert status == 2
    assert text.err.startswith("Error: ")
    assert "nothing" in text.err


def test_a_folder_without_checkpoints_is_no_run(tmp_path):
    with pytest.raises(InputError, match="is no run folder"):
        list_run(tmp_path)


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1.5e9, "1.5 GB"),
                                            (2e15, "2000.0 TB")])  # fmt: skip
def test_sizes_read_well(size, text):
    assert size_text(size) == text


def test_the_document_shows_what_there_is(tmp_path):
    text = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python -m zaya_jax\.checkpoint (.*)$", text, re.MULTILINE)
    verbs = {module._parser().parse_args(shlex.split(command)).verb for command in commands}
    assert verbs == {"ls", "verify", "inspect", "diff", "prune", "average", "export-hf", "import-hf", "verify-hf"}
    (section,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "config.yaml").write_text(f"extends: {ROOT / 'configs' / 'tiny.yaml'}\n{section}")
    assert load_config(tmp_path / "config.yaml").checkpoint.verify == "readback"
    assert yaml.safe_load(section)["checkpoint"]["keep_best"] == 1
