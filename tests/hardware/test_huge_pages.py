"""Huge pages: when a program starts again for them, and that it starts once."""

import os
import subprocess
import sys

import pytest

from tests.devices_helpers import ROOT
from zaya_jax.hardware.detection import use_huge_pages


@pytest.mark.parametrize(("setting", "variables", "starts"), [
    ("always [madvise] never", {"A": "b"}, True),
    ("always [madvise] never", {"GLIBC_TUNABLES": ""}, False),
    ("[always] madvise never", {}, False),
    ("always madvise [never]", {}, False),
    (None, {}, False),
])  # fmt: skip
def test_a_program_starts_again_where_huge_pages_must_be_asked_for(setting, variables, starts, tmp_path):
    if setting is not None:
        folder = tmp_path / "sys/kernel/mm/transparent_hugepage"
        folder.mkdir(parents=True)
        (folder / "enabled").write_text(setting + "\n")
    calls = []
    use_huge_pages(tmp_path, variables, lambda *arguments: calls.append(arguments))
    expected = (sys.executable, sys.orig_argv, {**variables, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})
    assert calls == [expected] * starts


@pytest.mark.parametrize("module", ["zaya_jax.main", "zaya_jax.machine"])
def test_the_command_is_the_same_afterwards(module):
    kept = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    done = subprocess.run([sys.executable, "-m", module, "--help"], cwd=ROOT, env=kept, capture_output=True,
                          text=True, check=False, timeout=60)  # fmt: skip
    assert done.returncode == 0
    assert f"usage: python -m {module}" in done.stdout
