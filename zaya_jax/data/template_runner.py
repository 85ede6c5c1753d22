"""Chat templates run in a separate process with limits on CPU time and memory; see `template_process`."""

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from zaya_jax.errors import RunStopped

SECONDS = 10  # of CPU that a template may take with one conversation
LONGEST = 2**27  # bytes of a request, of which the process needs several times as much memory to parse it


def run_template(source: str, renderings: list[dict[str, Any]]) -> dict[str, Any]:
    """Compile a template and render it.

    Args:
      source: of the template.
      renderings: for each the `marks` around generated text and the `names` that the template sees.

    Returns:
      `texts`, one for each rendering, and `has_generation`; or else one of `syntax` (with its `line`), `compile` and
      `render`, a message.

    Raises:
      ValueError: the renderings are not what JSON can hold.
      RunStopped: the process cannot run.
    """
    return _runner(os.getpid()).ask({"source": source, "renderings": renderings, "seconds": SECONDS})


@functools.lru_cache(maxsize=1)
def _runner(process: int) -> "_Runner":
    del process  # a fork has its parent's pipes, and needs its own
    return _Runner()


class _Runner:
    """One process, started when it is first needed and again when a template has ended it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self._close)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(request).encode() + b"\n"
        if len(data) > LONGEST:
            return {"render": f"its input is larger than {LONGEST // 2**20} MiB as JSON"}
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._close()  # it was killed while it waited, for which no template is to blame
            try:
                answer = self._send(data)
            except BaseException:  # Ctrl-C: the answer that is under way must not be taken for the next one's
                self._close()
                raise
            if answer.endswith(b"\n"):
                return json.loads(answer)
            status = self._close()
        if status == -signal.SIGXCPU:
            return {"render": f"it takes more than {request['seconds']} s"}
        if status < 0:
            name = signal.Signals(-status).name
            return {"render": f"its process was ended by {name}, perhaps because it ran out of memory"}
        raise RunStopped(f"The chat template process cannot run: it ended with status {status}. Try "
                         f"{sys.executable} -c 'import jinja2'.")  # fmt: skip

    def _send(self, data: bytes) -> bytes:
        if self._process is None:
            script = Path(__file__).with_name("template_process.py")
            # Not in the terminal's group of processes, whose Ctrl-C is for the parent; -P, since a module beside the
            # script may have the name of one that it imports.
            self._process = subprocess.Popen([sys.executable, "-P", script], stdin=subprocess.PIPE,  # noqa: S603
                                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                             start_new_session=True)  # fmt: skip
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None  # noqa: PT018, S101 - they are pipes
        try:
            stdin.write(data)
            stdin.flush()
        except BrokenPipeError:  # it has ended
            return b""
        return stdout.readline()

    def _close(self) -> int:
        """End the process; its exit status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        try:
            process.stdout.close()  # pyright: ignore[reportOptionalMemberAccess]
            process.stdin.close()  # pyright: ignore[reportOptionalMemberAccess]
        except BrokenPipeError:
            pass
        try:
            return process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
