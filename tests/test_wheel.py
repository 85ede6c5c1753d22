"""The wheel works outside the repository: built, installed into an empty environment, and used in an empty folder."""

import os
import re
import shutil
import site
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.compile_helpers import CHEAP
from zaya_jax import __version__
from zaya_jax.config.shipped import shipped_names

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MEGABYTE = 2**20
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
SMALL = ["data.corpus=texts", "data.suffixes=[.txt]", "data.cache_dir=cache", "data.heldout_fraction=0.3",
         "data.context=64", "model.vocab_size=300", "model.hidden_size=32", "model.num_layers=2", "model.num_experts=4",
         "phases.0.tokens=512", "phases.0.schedule.warmup_tokens=0", "train.batch.tokens=256",
         "evaluation.batch_size=2", "evaluation.batches=1", "sample.tokens=4"]  # fmt: skip


def run(*command: object, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command that sees nothing of the repository."""
    environment |= {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")
                    and name not in environment}  # fmt: skip
    environment["XLA_FLAGS"] = CHEAP
    return subprocess.run([str(word) for word in command], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=300, check=False)  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]):
        shutil.copy(ROOT / name, folder)
    for name in ("zaya_jax", "pallas_kernels", "configs"):  # a build writes into its folder
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    backend = PROJECT["build-system"]["build-backend"]
    done = run(sys.executable, "-c", f"import {backend} as backend; backend.build_wheel('dist')", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (folder / "dist").iterdir()
    return path


@pytest.fixture(scope="module")
def zaya(wheel: Path) -> Path:
    """The command `zaya` of an environment with the wheel, which shares this one's other packages."""
    environment = wheel.parents[1] / "environment"
    done = run(sys.executable, "-m", "venv", "--without-pip", environment)
    assert done.returncode == 0, done.stderr
    (packages,) = environment.glob("lib/python*/site-packages")
    # A line of a .pth file adds a folder, but not what the .pth files in it add, such as a clone of zaya_jax.
    (packages / "shared.pth").write_text("\n".join(site.getsitepackages()))
    done = run(*PIP, "--python", environment / "bin" / "python", "install", "--no-deps", "--no-index", wheel)
    assert done.returncode == 0, done.stdout + done.stderr
    done = run(environment / "bin" / "python", "-c", "import zaya_jax; print(zaya_jax.__file__)", folder=environment)
    assert Path(done.stdout.strip()).is_relative_to(packages)
    return environment / "bin" / "zaya"


def test_the_wheel_has_all_that_the_package_reads_and_is_small(wheel: Path):
    assert wheel.name == f"zaya_jax-{PROJECT['project']['version']}-py3-none-any.whl"
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(.+?)\]", changelog, re.MULTILINE)
    assert newest
    assert PROJECT["project"]["version"] == __version__ == newest[1]
    names = set(zipfile.ZipFile(wheel).namelist())
    code = {str(path.relative_to(ROOT)) for package in ("zaya_jax", "pallas_kernels")
            for path in (ROOT / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts}  # fmt: skip
    assert names >= code | {f"zaya_jax/{name}" for name in shipped_names("**")}
    assert {name.partition("/")[0] for name in names} == {
        "zaya_jax", "pallas_kernels", f"zaya_jax-{__version__}.dist-info"
    }  # fmt: skip
    print(f"{wheel.name}: {wheel.stat().st_size / MEGABYTE:.2f} MB, {len(names)} files")
    assert wheel.stat().st_size < 1.5 * MEGABYTE


def test_an_unpacked_wheel_finds_its_configurations_in_an_empty_folder(wheel: Path, tmp_path: Path):
    unpacked, empty = tmp_path / "unpacked", tmp_path / "empty"
    empty.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    (named,) = (entry for distribution in distributions(path=[str(unpacked)]) for entry in distribution.entry_points)
    assert (named.name, named.value) == ("zaya", "zaya_jax.__main__:main")
    # What `zaya` does, without the folder of the clone among those that are searched.
    code = ("import sys; sys.path = [path for path in sys.path if path != sys.argv[1]]; import zaya_jax.main as m; "
            "print(m.__file__, file=sys.stderr); sys.exit(m.main(sys.argv[2:]))")  # fmt: skip
    asked = [sys.executable, "-c", code, ROOT, "--print-config", "--config"]
    done = run(*asked, "configs/tiny.yaml", "seed=7", folder=empty, PYTHONPATH=str(unpacked))
    assert done.returncode == 0, done.stderr
    assert Path(done.stderr.strip()).is_relative_to(unpacked)
    assert re.search(r"^seed: 7$", done.stdout, re.MULTILINE)
    done = run(*asked, "configs/tny.yaml", folder=empty, PYTHONPATH=str(unpacked))
    assert done.returncode == 2
    assert "Did you mean configs/tiny.yaml?" in done.stderr
    assert list(empty.iterdir()) == []


@pytest.mark.soak
def test_a_model_is_trained_asked_and_exported_in_an_empty_folder(zaya: Path, tmp_path: Path):
    (tmp_path / "texts").mkdir()
    for index in range(8):
        (tmp_path / "texts" / f"{index}.txt").write_text(f"def function_{index}(argument):\n" * 40)
    for command, said in (
        (["train", "--config", "configs/tiny.yaml", *SMALL], "Run folder: runs/tiny"),
        (["generate", "runs/tiny", "--prompt", "def ", "--max-new-tokens", 4], "def "),
        (["checkpoint", "export-hf", "runs/tiny", "exported"], "Exported "),
    ):
        done = run(zaya, *command, folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert said in done.stdout
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "exported", "runs", "texts"]
