"""Versions of installed packages."""

from importlib.metadata import PackageNotFoundError, version


def package_version(name: str) -> str | None:
    """Return the version of a package; None without its metadata, as for this one in a tree of sources."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
