"""Read new messages of the kernel's log without waiting: from /dev/kmsg, or from a file that grows."""

import contextlib
import os
import stat
from pathlib import Path

from zaya_jax.aegis.output import LineBuffer
from zaya_jax.aegis.signatures import LONGEST_LINE

DEVICE = Path("/dev/kmsg")
_LONGEST_RECORD = 16384  # bytes; the kernel's longest is 8192
_MOST_RECORDS = 1000  # per call
_MOST_BYTES = 1 << 18  # per call


class KernelLog:
    """The messages that the kernel logs after this object was created."""

    def __init__(self, path: Path = DEVICE) -> None:
        """Open /dev/kmsg, or a file to which the site writes the kernel's log, at its end.

        A file that does not exist yet is read from its start once it appears.
        """
        self.path = path
        self.problem = ""  # sentence that says why nothing can be read
        self._fd: int | None = None
        self._is_device, self._lines, self._in_line = False, LineBuffer(), False
        self._may_appear = not path.is_relative_to("/dev") and not path.exists()
        if not self._may_appear:
            self._open(os.SEEK_END)

    def read(self) -> list[str]:
        """Return the new messages, of at most `LONGEST_LINE` characters each; call again for more than 1000."""
        try:
            if self._is_device and self._fd is not None:
                return self._read_device(self._fd)
            self._reopen()
            complete = b"" if self._fd is None else self._lines.add(os.read(self._fd, _MOST_BYTES))
            lines = complete.splitlines()[self._in_line :]  # the rest of a cut line is no message
            self._in_line = self._in_line if not complete else not complete.endswith(b"\n")
            return [line[:LONGEST_LINE].decode("utf-8", "replace") for line in lines if line.strip()]
        except BlockingIOError:
            return []
        except OSError as error:
            self._fail(error)
            return []

    def close(self) -> None:
        """Close the log."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
        self._fd, self._is_device = None, False

    def _open(self, whence: int) -> None:
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
            mode = os.fstat(self._fd).st_mode
            self._is_device = stat.S_ISCHR(mode)
            if not self._is_device and not stat.S_ISREG(mode):
                self.close()
                self.problem = f"The kernel log {self.path} is neither /dev/kmsg nor a regular file."
                return
            os.lseek(self._fd, 0, whence)
        except OSError as error:
            self._fail(error)

    def _reopen(self) -> None:
        """Follow the file if it was rotated or emptied, and open it once it appears."""
        if self._fd is None:
            if self._may_appear and self.path.exists():
                self._may_appear = False
                self._open(os.SEEK_SET)
            return
        opened = os.fstat(self._fd)
        if opened.st_size < os.lseek(self._fd, 0, os.SEEK_CUR):
            os.lseek(self._fd, 0, os.SEEK_SET)
        elif opened.st_size == os.lseek(self._fd, 0, os.SEEK_CUR):  # read to its end: rotation loses nothing
            with contextlib.suppress(FileNotFoundError):
                if not os.path.samestat(opened, os.stat(self.path)):
                    self.close()
                    self._open(os.SEEK_SET)

    def _read_device(self, fd: int) -> list[str]:
        messages: list[str] = []
        for _ in range(_MOST_RECORDS):
            try:
                record = os.read(fd, _LONGEST_RECORD)  # one record each
            except BlockingIOError:
                break
            except BrokenPipeError:  # overwritten before they were read; the next read returns the oldest that is left
                continue
            if not record:
                break
            if message := parse_record(record):
                messages.append(message)
        return messages

    def _fail(self, error: OSError) -> None:
        self.close()
        self.problem = f"The kernel log {self.path} cannot be read: {error.strerror or error}."
        if isinstance(error, PermissionError):
            remedy = "`sysctl kernel.dmesg_restrict=0` or CAP_SYSLOG, or name a file that receives dmesg"
            self.problem += f" Allow it with {remedy}."


def parse_record(record: bytes) -> str:
    """Return the message of one record of /dev/kmsg; empty if it is malformed or was written by a program.

    A record is `priority,sequence,microseconds,flags[,…];message`, and lines of attributes (dev-kmsg in the kernel's
    Documentation/ABI/testing). The priority holds the facility in bits 3 and above; the kernel's is 0.
    """
    head, separator, rest = record.partition(b";")
    priority = head.split(b",", 1)[0]
    if not separator or not priority.isdigit() or len(priority) > 6 or int(priority) >> 3:
        return ""
    return rest.split(b"\n", 1)[0][:LONGEST_LINE].decode("utf-8", "replace").strip()
