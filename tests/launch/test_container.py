"""The extra `rocm` and its container: the versions agree. `.ci/run` resolves the extra with pip."""

import re
import tomllib

from tests.train_helpers import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "containers" / "rocm.Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
VERSIONS = {"3.11": "0.10.2", "3.12": "0.12.0"}  # of jax and its plugin, by Python


def instructions(name: str) -> list[str]:
    return [line.removeprefix(name).strip() for line in DOCKERFILE.splitlines() if line.startswith(f"{name} ")]


def test_each_python_has_one_jax_and_its_plugin():
    for python, version in VERSIONS.items():
        marker = 'python_version < "3.12"' if python == "3.11" else 'python_version >= "3.12"'
        assert f"jax[rocm7-local]=={version} ; {marker}" in PROJECT["optional-dependencies"]["rocm"]
        for package in ("jax", "jaxlib", "jax-rocm7-plugin", "jax-rocm7-pjrt"):
            assert f"\n{package}=={version} ; {marker}\n" in CONSTRAINTS


def test_jax_is_capped_at_the_newest_minor_version_that_is_tested():
    major, minor, _ = VERSIONS["3.12"].split(".")
    (jax,) = (line for line in PROJECT["dependencies"] if line.startswith("jax>"))
    assert jax == f"jax>={VERSIONS['3.11']},<{major}.{int(minor) + 1}"


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
    assert all(f"COPY {name}" in before for name in ("zaya_jax", "pallas_kernels", "configs")), (
        "they are built into the package"
    )


def test_the_container_stands_on_a_stated_rocm_7_with_python_3_12():
    (base,) = instructions("FROM")
    assert re.fullmatch(r"rocm/dev-ubuntu-24\.04:7\.\d+\.\d+-complete", base)  # Ubuntu 24.04's Python is 3.12


def test_the_builder_is_sent_what_the_container_copies_and_no_more():
    ignored = (ROOT / "containers" / "rocm.Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in ignored if line and not line.startswith("#")]
    assert rules[0] == "*"
    sent = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert sent == {source for line in instructions("COPY") for source in line.split()[:-1]}
