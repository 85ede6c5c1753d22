"""Shipped configurations are found in every folder, behind files of the same name there."""

from pathlib import Path

import pytest

from tests.config_helpers import refused_to_load, written
from zaya_jax.aegis.policy import Policy, load_policy
from zaya_jax.config import load_config
from zaya_jax.config.shipped import shipped_names
from zaya_jax.evaluate.harness import load_suite

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_shipped_files_are_those_of_the_repository():
    files = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("configs/**/*.yaml"))
    assert shipped_names("**") == files
    assert shipped_names() == [name for name in files if name.count("/") == 1]


def test_every_kind_of_file_is_found_in_an_empty_folder():
    assert load_config("configs/tiny.yaml") == load_config(ROOT / "configs" / "tiny.yaml")
    assert load_suite("configs/evals/base.yaml") == load_suite(ROOT / "configs" / "evals" / "base.yaml")
    assert load_policy("configs/aegis/default.yaml") == Policy()


def test_a_file_of_the_current_folder_comes_first(tmp_path):
    (tmp_path / "configs").mkdir()
    written(tmp_path / "configs", "extends: configs/tiny.yaml\nseed: 7\n", "tiny.yaml")  # the shipped one
    written(tmp_path / "configs", "extends: tiny.yaml\nrun_dir: runs/mine\n", "mine.yaml")  # its neighbor
    assert load_config("configs/mine.yaml").seed == load_config("configs/tiny.yaml").seed == 7
    assert load_config("configs/recipe_tiny.yaml").seed == 0


@pytest.mark.parametrize("name", ["configs/tny.yaml", "tiny.yaml", "configs/../configs/tiny.yml"])
def test_a_name_that_is_nowhere_is_refused_with_the_nearest_and_all_there_are(name):
    message = refused_to_load(name)
    assert f"The configuration {name} does not exist." in message
    assert "Did you mean configs/tiny.yaml?" in message
    assert message.endswith(f"zaya_jax ships {', '.join(shipped_names())}.")


def test_a_suite_that_is_nowhere_is_refused_with_the_suites():
    suites = ", ".join(shipped_names("evals"))
    message = refused_to_load("configs/evals/bse.yaml")
    assert message.endswith(f"Did you mean configs/evals/base.yaml? zaya_jax ships {suites}.")


def test_a_path_does_not_leave_the_shipped_folder(tmp_path):
    assert "does not exist" in refused_to_load("configs/../__init__.py")
    (tmp_path / "configs").mkdir()
    assert "Is a directory" in refused_to_load("configs")


def test_a_misspelled_file_of_the_user_is_refused_with_the_nearest(tmp_path):
    (tmp_path / "mine.yaml").write_text("run_dir: runs/mine")
    assert "Did you mean configs/recipe_tiny.yaml?" in refused_to_load(f"{tmp_path}/recipe_tiny.yaml")
    assert f"Did you mean {tmp_path}/mine.yaml?" in refused_to_load(f"{tmp_path}/mine.yml")
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "tiny.yaml").write_text("run_dir: runs/mine")
    assert f"Did you mean {tmp_path}/experiments/tiny.yaml?" in refused_to_load(f"{tmp_path}/experiment/tiny.yaml")
