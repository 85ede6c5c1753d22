"""Pass on the output of the processes: complete lines, unchanged, without ever waiting for a slow reader."""

import collections
import os
import select

_CHUNK = 4096  # bytes; a pipe that is ready accepts as many without blocking
_MOST_PENDING = 2**20  # bytes
_LONGEST_PARTIAL = 2**16  # bytes of a line without end


class LineBuffer:
    """Holds back the last line of a stream until it ends."""

    partial = b""  # the line that has no end yet

    def add(self, content: bytes) -> bytes:
        """Return the lines that end in `content`; a longer one than 64 KiB without its end."""
        complete, newline, self.partial = (self.partial + content).rpartition(b"\n")
        if len(self.partial) <= _LONGEST_PARTIAL:
            return complete + newline
        partial, self.partial = self.partial, b""
        return complete + newline + partial


class Output:
    """One of the supervisor's own streams. If nobody reads it, the oldest lines are dropped and counted."""

    def __init__(self, file: int) -> None:
        self._file, self._pending, self._size = file, collections.deque[bytes](), 0
        self._poll = select.poll()
        self._poll.register(file, select.POLLOUT)
        self._closed = False
        self.dropped = 0  # bytes

    def write(self, content: bytes) -> None:
        """Queue `content`, and write what can be written now."""
        self._pending.append(content)
        self._size += len(content)
        self.flush()
        while self._size > _MOST_PENDING:
            lost = self._pending.popleft()
            self._size -= len(lost)
            self.dropped += len(lost)

    def say(self, sentence: str) -> None:
        """Write a line of the supervisor's own."""
        self.write(f"aegis: {sentence}\n".encode(errors="backslashreplace"))

    def flush(self, seconds: float = 0.0) -> None:
        """Write what can be written, waiting at most `seconds` each time for the reader."""
        while self._pending and not self._closed and self._poll.poll(1000 * seconds):
            head = self._pending.popleft()
            try:
                written = os.write(self._file, head[:_CHUNK])
            except OSError:  # closed, as by `head`
                self._closed, written = True, len(head)
            self._size -= written
            if written < len(head):
                self._pending.appendleft(head[written:])
        if self._closed:
            self._pending.clear()
            self._size = 0


class Stream:
    """A process' stdout or stderr: passes on complete lines, and remembers the last ones."""

    def __init__(self, file: int, output: Output, kept: int = 200) -> None:
        """Read from the non-blocking descriptor `file`, and pass on to `output`; keep the last `kept` lines."""
        self.file, self._output, self._lines = file, output, LineBuffer()
        self.last_lines = collections.deque[bytes](maxlen=kept)
        os.set_blocking(file, False)

    def read(self, most: int = 2**20) -> list[bytes]:
        """Read at most `most` bytes, and return the lines that ended in them."""
        lines: list[bytes] = []
        while most > 0:
            try:
                content = os.read(self.file, min(most, 2**16))
            except BlockingIOError:
                break
            if not content:
                self.close()
                break
            most -= len(content)
            if complete := self._lines.add(content):
                self._output.write(complete)
                lines += complete.removesuffix(b"\n").split(b"\n")
        self.last_lines.extend(line[:2048] for line in lines)
        return lines

    @property
    def is_open(self) -> bool:
        """True if the process may still write."""
        return self.file >= 0

    def close(self) -> None:
        """Pass on the last, unfinished line, and close."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1
            if self._lines.partial:
                self.last_lines.append(self._lines.partial[:2048])
                self._output.write(self._lines.partial + b"\n")
                self._lines.partial = b""
