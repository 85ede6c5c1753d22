import sys

from zaya_jax.checkpoint.environment import environment, versions


def test_versions_are_known_where_packages_have_metadata_and_no_error_where_they_have_none(monkeypatch):
    assert "unknown" not in versions().values()
    monkeypatch.setattr(sys, "path", [])  # as in a tree of sources, for all packages at once
    assert set(versions().values()) - {versions()["python"]} == {"unknown"}
    assert environment()["jaxlib"] is None
