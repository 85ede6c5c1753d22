"""New messages of the Linux kernel, from `/dev/kmsg` or a file that something else writes."""

import os
import stat

_MOST_RECORDS = 1000  # read at once
_LONGEST = 8192  # bytes of a record of /dev/kmsg


class KernelLog:
    """Reads what is written after it was opened; never waits.

    Attributes:
      problem: why nothing can be read; empty if it can.
    """

    def __init__(self, path: str) -> None:
        """Open the log at its end."""
        self._file, self._partial, self.problem = -1, b"", ""
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._is_device = stat.S_ISCHR(os.fstat(self._file).st_mode)
            os.lseek(self._file, 0, os.SEEK_END)
        except OSError as error:
            self.problem = f"The kernel log {path} cannot be read: {error.strerror}."

    def read(self) -> list[bytes]:
        """Return the new messages, at most 1,000."""
        if self._file < 0:
            return []
        return self._read_records() if self._is_device else self._read_lines()

    def close(self) -> None:
        """Close the log."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _read_records(self) -> list[bytes]:
        """Read records of the device: `priority,sequence,time,flags;message`, then lines of details."""
        messages = []
        for _ in range(_MOST_RECORDS):
            try:
                record = os.read(self._file, _LONGEST)
            except BrokenPipeError:  # records were overwritten before they were read
                continue
            except OSError:
                break
            messages.append(record.partition(b";")[2].partition(b"\n")[0])
        return messages

    def _read_lines(self) -> list[bytes]:
        try:
            content = self._partial + os.read(self._file, 2**16)
        except OSError:
            return []
        *lines, self._partial = content.split(b"\n")
        self._partial = self._partial[:_LONGEST]
        return lines[:_MOST_RECORDS]
