"""The health check: what is wrong comes first, with what to do; levels; a training step that is run twice."""

import itertools
import json
import re
import shutil
import sys
from importlib.metadata import metadata
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from tests.data_helpers import run_config, write_source
from zaya_jax.lab.measure import doctor as doctor_module
from zaya_jax.lab.measure import installation as module
from zaya_jax.lab.measure.installation import check_installation
from zaya_jax.machine.__main__ import main

CACHE = {"JAX_COMPILATION_CACHE_DIR": "/nowhere"}


def statuses(checks):
    return {check.check: check.status for check in checks}


def test_this_installation_passes(capsys, tmp_path):
    assert main(["doctor", "--output", str(tmp_path / "doctor.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "All checks pass."
    assert {line[:4] for line in lines[:-1]} <= {"PASS", "WARN"}
    result = json.loads((tmp_path / "doctor.json").read_text())
    assert (result["benchmark"], len(result["checks"])) == ("doctor", len(lines) - 1)


def test_a_gpu_that_jax_does_not_use_fails_first_with_what_to_type(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "kfd").touch()
    first, *others = check_installation(tmp_path, CACHE)
    assert (first.check, first.status) == ("devices", "FAIL")
    assert "pip install -e '.[rocm]' -c constraints.txt" in first.message
    assert statuses(check_installation(tmp_path, CACHE | {"JAX_PLATFORMS": "cpu"}))["devices"] == "PASS"
    assert "FAIL" not in statuses(others).values()


@pytest.mark.parametrize(("name", "free", "status"), [
    ("disk", 2 * 10**9, "PASS"), ("disk", 2 * 10**9 - 1, "WARN"),
    ("memory of the host", 2 * 10**9, "PASS"), ("memory of the host", 2 * 10**9 - 1, "WARN"),
])  # fmt: skip
def test_little_memory_and_disk_are_warnings(name, free, status, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "free_memory", lambda: free if name != "disk" else 10**12)
    usage = SimpleNamespace(free=free if name == "disk" else 10**12)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert statuses(check_installation(tmp_path, CACHE))[name] == status


@pytest.mark.parametrize(("package", "version", "message"), [
    ("flax", "0.1.0", r"flax>=[\d.]+ \(0\.1\.0\)"), ("grain", None, r"grain>=[\d.]+ \(not installed\)"),
])  # fmt: skip
def test_a_package_that_does_not_fit_fails(package, version, message, monkeypatch, tmp_path):
    actual = module.package_version
    monkeypatch.setattr(module, "package_version", lambda name: version if name == package else actual(name))
    first, *_ = check_installation(tmp_path, CACHE)
    assert (first.check, first.status) == ("packages", "FAIL")
    assert re.search(message, first.message)
    assert "pip install -e . -c constraints.txt" in first.message


def test_every_extra_is_listed_once_and_one_counts_only_with_all_its_packages(tmp_path, monkeypatch):
    (message,) = (check.message for check in check_installation(tmp_path, CACHE) if check.check == "extras")
    installed, missing = (part.partition(": ")[2].split(", ") for part in message.split("; "))
    extras = set(metadata("zaya-jax").get_all("Provides-Extra", []))
    extras -= {"ports"} if sys.version_info < (3, 12) else set()  # which has no package there
    assert sorted([*installed, *missing]) == sorted(extras)
    assert "test" in installed
    assert {"rocm", "cuda"} <= set(missing)  # their own packages are those of `jax`, which is here without a plugin
    actual = module.package_version
    monkeypatch.setattr(module, "package_version", lambda name: None if name == "chex" else actual(name))
    (message,) = (check.message for check in check_installation(tmp_path, CACHE) if check.check == "extras")
    assert "test" in message.partition("not installed: ")[2].split(", ")


@pytest.mark.parametrize(("arguments", "message"), [
    ("--level full", "--level full needs a CONFIG."),
    ("configs/tiny.yaml --level quick", "--level quick takes no CONFIG."),
    ("--baseline a.json", "--baseline a.json needs a CONFIG"),
    ("configs/none.yaml", "configs/none.yaml"),
])  # fmt: skip
def test_bad_input_is_named(arguments, message, capsys):
    assert main(["doctor", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def repeated(tmp_path_factory):
    """Checks of a training step that is right, of one with a tensor that differs, of a loss that is not finite."""
    folder = tmp_path_factory.mktemp("run")
    write_source(folder / "a", [[1, 2, 3]], [[1, 2]])
    config, checks = run_config(folder, ["a"], []), {}
    actual, calls = doctor_module.digests, itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        (checks["right"],) = doctor_module._repeated_step(config)
        patch.setattr(doctor_module, "digests", lambda results: actual(results) | {"loss": str(next(calls))})
        (checks["differs"],) = doctor_module._repeated_step(config)
        patch.setattr(doctor_module, "digests", actual)
        initialize = doctor_module.initialize
        patch.setattr(doctor_module, "initialize", lambda program: jax.tree.map(spoil, initialize(program)))
        (checks["not finite"],) = doctor_module._repeated_step(config)
    return checks


def spoil(leaf):
    return leaf * jnp.nan if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def test_a_training_step_is_compared_with_its_repetition(repeated):
    assert {name: check.status for name, check in repeated.items()} == {
        "right": "PASS", "differs": "FAIL", "not finite": "FAIL"}  # fmt: skip
    assert repeated["right"].message.startswith("The same twice; loss ")
    assert repeated["differs"].message == "1 tensor changed when the step was repeated, such as loss."
    assert repeated["not finite"].message == "The loss is nan."
