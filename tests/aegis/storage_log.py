"""A log of who writes where in folders, kept by the kernel (fanotify): no writer can leave it out. Needs root."""

import contextlib
import ctypes
import os
import select
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from zaya_jax.run.fencing import FENCE

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLOSE_ON_EXEC, _ADD = 0x1, 0x1
_MODIFY, _CLOSE_WRITE, _CHILDREN = 0x2, 0x8, 0x0800_0000
_HERE = -100  # AT_FDCWD
_EVENT = struct.Struct("=IBBHQii")


class Write(NamedTuple):
    """A write to a file."""

    time: float  # of `time.monotonic`, when it was read
    pid: int
    name: str  # of the file


class StorageLog:
    """Logs the writes to the files of folders, but not of those within."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.writes: list[Write] = []
        self._file = _LIBC.fanotify_init(_CLOSE_ON_EXEC, os.O_RDONLY)
        assert self._file >= 0, os.strerror(ctypes.get_errno())
        mask = ctypes.c_uint64(_MODIFY | _CLOSE_WRITE | _CHILDREN)
        for folder in folders:
            assert _LIBC.fanotify_mark(self._file, _ADD, mask, _HERE, os.fsencode(folder)) == 0
        self._closed = False
        self._thread = threading.Thread(target=self._read, name="storage", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._thread.join()
        os.close(self._file)

    def _read(self) -> None:
        while not self._closed:
            if not select.select([self._file], [], [], 0.1)[0]:
                continue
            content, now = os.read(self._file, 65536), time.monotonic()
            while content:
                length, _, _, _, _, file, pid = _EVENT.unpack_from(content)
                with contextlib.suppress(OSError):
                    self.writes.append(Write(now, pid, os.path.basename(os.readlink(f"/proc/self/fd/{file}"))))
                os.close(file)
                content = content[length:]

    def takers(self) -> list[int]:
        """The pids of the processes that took a fencing token, in order."""
        return list(dict.fromkeys(write.pid for write in list(self.writes) if FENCE in write.name))

    def late_writes(self, seconds: float) -> list[Write]:
        """Writes of processes that took a token, more than some seconds after another had taken a newer one."""
        newest, since, order, late = -1, 0.0, {pid: place for place, pid in enumerate(self.takers())}, []
        for write in list(self.writes):
            place = order.get(write.pid, newest)
            if place > newest:
                newest, since = place, write.time
            elif place < newest and write.time > since + seconds:
                late.append(write)
        return late
