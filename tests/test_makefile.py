"""The Makefile installs what the machine has a use for, shows what it installs, and stops where that fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.times import expected_minutes

ROOT = Path(__file__).parent.parent


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `make` as from a shell, also where `make test` runs this."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "ZAYA_INSTALL")
    }
    command = ["make", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def venv(tmp_path):
    """An environment without packages, whose Python is the tests'."""
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "pyvenv.cfg").touch()
    (folder / ".stamp-venv").write_text(f"{folder}\n")
    return folder


@pytest.mark.parametrize(("gpu", "packages"), [("", "-e . "), ("cuda", "'.[cuda]'"), ("rocm", "'.[rocm]'")])
def test_training_installs_what_uses_the_gpu_of_this_machine(gpu, packages, venv):
    printed = make("-n", "train", f"VENV={venv}", f"GPU={gpu}").stdout
    installed, trained = printed.index(packages), printed.index("zaya_jax.main --config configs/tiny.yaml")
    assert installed < trained


def test_an_installation_shows_the_large_packages(venv):
    lines = [
        "Collecting jax==1",
        "  Downloading jax-1-py3-none-any.whl (3.1 MB)",
        "  Using cached numpy-2.whl (17.0 MB)",
        "  Downloading six-1-py3-none-any.whl (11 kB)",
        "Installing collected packages: jax, numpy, six",
    ]
    (pip := venv / "pip").write_text("cat <<END\n" + "\n".join(lines) + "\nEND\n")
    made = make(f"{venv}/.stamp-run", f"VENV={venv}", f"ZAYA_INSTALL=sh {pip}")
    assert made.stdout.splitlines()[-3:] == [
        "  jax-1-py3-none-any.whl (3.1 MB)", "  numpy-2.whl (17.0 MB)", "  unpacking 3 packages"
    ]  # fmt: skip


def test_a_failed_installation_is_not_taken_for_done(venv):
    made = make(f"{venv}/.stamp-run", f"VENV={venv}", "ZAYA_INSTALL=echo no network >&2; exit 1;")
    assert made.returncode
    assert "no network" in made.stderr
    assert not (venv / ".stamp-run").exists()


def test_tests_say_how_long_they_take():
    record = {"total": 480.0, "reference": 1.5}
    assert [expected_minutes(record, reference, cpus) for reference, cpus in ((1.5, 2), (3.0, 2), (1.5, 16))] == [
        4,
        8,
        2,
    ]
    assert "tests.tools.times" in make("-n", "test").stdout
    assert "tests.tools.times" not in make("-n", "test", "PYTEST_ARGS=tests/ops").stdout
