"""Only the user who starts a job can read its secret, and only while its processes connect."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.users_helpers import needs_root
from zaya_jax.errors import InputError
from zaya_jax.run.job_secret import VARIABLE, is_proof, prove, read_secret, secret_path, share_secret


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.mark.parametrize("folder", ["", "run", "a/b/run"])  # which was there, or is removed with the file
def test_the_file_is_private_and_gone_once_all_are_connected(tmp_path, folder):
    path = secret_path(tmp_path / folder, "node1:8476")
    assert read_secret(path) is None
    with share_secret(path) as secret:
        assert read_secret(path) == secret
        assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == []


def test_a_later_start_replaces_the_secret_and_keeps_its_own(tmp_path):
    path = tmp_path / "job_secret"
    with share_secret(path) as first:
        later = share_secret(path)
        secret = later.__enter__()
    assert read_secret(path) == secret != first
    later.__exit__(None, None, None)
    assert not path.exists()


def test_no_link_is_followed(tmp_path):
    path, target = tmp_path / "job_secret", tmp_path / "target"
    target.write_text("kept")
    target.chmod(0o600)
    path.symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        read_secret(path)
    with share_secret(path):
        assert not path.is_symlink()
    assert target.read_text() == "kept"


@pytest.mark.parametrize("harm", [
    *(lambda path, mode=mode: path.chmod(mode) for mode in (0o640, 0o604, 0o620)),
    lambda path: (path.unlink(), os.mkfifo(path, 0o600)),
    pytest.param(lambda path: os.chown(path, 12345, -1), marks=needs_root),
])  # fmt: skip
def test_what_others_can_use_or_is_no_file_is_refused(tmp_path, harm):
    path = tmp_path / "job_secret"
    path.write_bytes(b"\xffsecret")
    path.chmod(0o600)
    assert read_secret(path) == os.fsdecode(b"\xffsecret")
    harm(path)
    with pytest.raises(InputError, match="must be a file that belongs to you and that nobody else can read"):
        read_secret(path)


def test_the_environment_takes_precedence_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "given")
    with share_secret(tmp_path / "job_secret") as secret:
        assert {secret, read_secret(tmp_path / "job_secret")} == {"given"}
        assert list(tmp_path.iterdir()) == []


def test_jobs_without_a_folder_have_a_file_for_each_address(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, second = (secret_path(None, address) for address in ("../../a:1", "b:1"))
    assert first != second
    assert first.parent == second.parent == Path(tmp_path) / "zaya_jax" / "jobs"


@given(st.text(st.characters(codec="utf-8"), max_size=80), st.text(max_size=20), st.text(max_size=20))
def test_only_the_right_secret_and_message_have_a_proof(text, secret, other):
    secret, other = (name.encode(errors="replace").decode() for name in (secret, other))
    proof = prove(secret, "label", other)
    assert is_proof(proof, secret, "label", other)
    assert not is_proof(text, secret, "label", other)
    assert is_proof(proof, f"{secret}x", "label", other) is is_proof(proof, secret, "label", f"{other}x") is False
