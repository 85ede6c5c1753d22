"""The extra `rocm` and its container: the versions agree, and pip can install them."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "containers" / "rocm.Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input")
VERSIONS = {"3.11": "0.10.2", "3.12": "0.12.0"}  # of jax and its plugin, by Python


def instructions(name: str) -> list[str]:
    return [line.removeprefix(name).strip() for line in DOCKERFILE.splitlines() if line.startswith(f"{name} ")]


def test_each_python_has_one_jax_and_its_plugin():
    for python, version in VERSIONS.items():
        marker = 'python_version < "3.12"' if python == "3.11" else 'python_version >= "3.12"'
        assert f"jax[rocm7-local]=={version} ; {marker}" in PROJECT["optional-dependencies"]["rocm"]
        for package in ("jax", "jaxlib", "jax-rocm7-plugin", "jax-rocm7-pjrt"):
            assert f"\n{package}=={version} ; {marker}\n" in CONSTRAINTS


def test_the_container_copies_what_there_is_and_installs_an_extra_that_exists():
    copied = [source for line in instructions("COPY") for source in line.split()[:-1]]
    assert {"pyproject.toml", "constraints.txt", "zaya_jax", "pallas_kernels", "configs"} <= set(copied)
    for source in copied:
        assert (ROOT / source).exists(), source
    read = {PROJECT["readme"], *PROJECT["license-files"]}
    assert read <= set(copied), "the build of the package reads them"
    (install,) = (line for line in instructions("RUN") if line.startswith("pip install"))
    extra, constraints = re.fullmatch(r"pip install --no-cache-dir '\.\[(\w+)\]' -c (\S+)", install).groups()
    assert extra in PROJECT["optional-dependencies"]
    assert constraints in copied
    before = DOCKERFILE[: DOCKERFILE.index("RUN pip install")]
    assert all(f"COPY {name}" in before for name in ("zaya_jax", "pallas_kernels")), "they are built into the package"


def test_the_container_stands_on_a_stated_rocm_7_with_python_3_12():
    (base,) = instructions("FROM")
    assert re.fullmatch(r"rocm/dev-ubuntu-24\.04:7\.\d+\.\d+-complete", base)  # Ubuntu 24.04's Python is 3.12


def test_the_builder_is_sent_what_the_container_copies_and_no_more():
    ignored = (ROOT / "containers" / "rocm.Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in ignored if line and not line.startswith("#")]
    assert rules[0] == "*"
    sent = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert sent == {source for line in instructions("COPY") for source in line.split()[:-1]}


def interpreter(version: str) -> tuple[str, dict[str, str]] | None:
    """A Python of `version` and the environment it answers in; under pyenv it answers when its version is named."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return sys.executable, dict(os.environ)
    names = [os.environ.get("PYENV_VERSION", "")]
    if shutil.which("pyenv"):
        listed = subprocess.run(["pyenv", "versions", "--bare"], text=True, capture_output=True, check=False).stdout
        names += [name for name in listed.split() if name.startswith(f"{version}.")]
    for name in names:
        environment = {**os.environ, **({"PYENV_VERSION": name} if name else {})}
        try:
            done = subprocess.run(
                [f"python{version}", *PIP, "--version"], env=environment, capture_output=True, check=False
            )
        except FileNotFoundError:
            return None
        if done.returncode == 0:
            return f"python{version}", environment
    return None


@pytest.mark.soak
@pytest.mark.parametrize("version", VERSIONS)
def test_pip_resolves_the_extra(version, tmp_path):
    """Some indexes serve no metadata apart from the wheels, and those of ROCm and jaxlib are 240 MB."""
    found = interpreter(version)
    if found is None:
        pytest.skip(f"There is no Python {version} with pip here.")
    python, environment = found

    def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([python, *PIP, *arguments], env=environment, cwd=ROOT, text=True, capture_output=True,
                              timeout=1200, check=False)  # fmt: skip

    if pip("download", "--retries=0", "--no-deps", "--dest", str(tmp_path), "iniconfig").returncode:
        pytest.skip("No package index can be reached.")
    done = pip("install", "--dry-run", "--ignore-installed", ".[rocm]", "-c", "constraints.txt")
    assert done.returncode == 0, done.stderr[-2000:]
    (would,) = re.findall(r"^Would install (.*)$", done.stdout, re.MULTILINE)
    packages = [f"{name}-{VERSIONS[version]}" for name in ("jax", "jaxlib", "jax-rocm7-plugin", "jax-rocm7-pjrt")]
    assert set(packages) <= set(would.split())
