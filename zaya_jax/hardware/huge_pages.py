"""Let the C library ask for huge pages: XLA allocates the temporaries of every step anew, and their pages cost time."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from zaya_jax.hardware.detection import read_file

_TUNABLES, _HUGE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"
_ROOT = Path("/")


def use_huge_pages(
    root: Path = _ROOT, environment: Mapping[str, str] = os.environ,
    replace: Callable[[str, list[str], dict[str, str]], None] = os.execve,
) -> None:  # fmt: skip
    """Start this program again with glibc's tunable for huge pages, which is only read at the start of a process.

    Nothing happens where huge pages are always used or never, or where `GLIBC_TUNABLES` is set. Other C libraries
    ignore the variable. On two cores of an AMD EPYC, the step of `configs/tiny.yaml` takes 13 % less time.

    Args:
      root: root of the file system, with `sys`.
      environment: environment variables.
      replace: replaces this process by a program with arguments and an environment.
    """
    setting = read_file(root / "sys/kernel/mm/transparent_hugepage/enabled")
    if "[madvise]" in setting and _TUNABLES not in environment:
        replace(sys.executable, sys.orig_argv, {**environment, _TUNABLES: _HUGE})
