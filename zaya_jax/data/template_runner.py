"""Run chat templates in a separate process with limits on CPU time and memory, see `template_process`."""

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

SECONDS = 10  # maximum CPU time per request
LONGEST = 2**27  # maximum bytes of a request; parsing it takes several times as much memory


def run_template(source: str, renderings: list[dict[str, Any]]) -> dict[str, Any]:
    """Compile a template and render it.

    Args:
      source: text of the template.
      renderings: one dict per rendering, with the `marks` to put around generated text, the `names` that the template
        can use, and optionally the time `now` in seconds, with which `strftime_now` is one of them.

    Returns:
      `texts`, one per rendering, and `has_generation`. After an error instead one of the messages `syntax` (with its
      `line`), `compile` and `render`.

    Raises:
      ValueError: JSON cannot represent the renderings.
      RunStopped: the process cannot be started.
    """
    return _runner(os.getpid()).ask({"source": source, "renderings": renderings, "seconds": SECONDS})


@functools.lru_cache(maxsize=1)
def _runner(process: int) -> "_Runner":
    del process  # part of the cache key: a forked process must not share its parent's pipes
    return _Runner()


class _Runner:
    """A process that is started on first use, and again after a template exceeded its limits."""

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
                self._close()  # it was killed between requests, so no template is the cause
            try:
                answer = self._send(data)
            except BaseException:  # after Ctrl-C, the pending answer must not be read as that of the next request
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
        raise RunStopped(f"The chat template process cannot run: it ended with status {status}. Check "
                         f"that this command works: {sys.executable} -c 'import jinja2'.")  # fmt: skip

    def _send(self, data: bytes) -> bytes:
        if self._process is None:
            script = Path(__file__).with_name("template_process.py")
            # A new session, so that Ctrl-C reaches only the parent. -P, so that modules next to the script do not
            # shadow those that it imports.
            self._process = subprocess.Popen([sys.executable, "-P", script], stdin=subprocess.PIPE,  # noqa: S603
                                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                             start_new_session=True)  # fmt: skip
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None  # noqa: PT018, S101 - both are pipes, see above
        try:
            stdin.write(data)
            stdin.flush()
        except BrokenPipeError:  # the process has ended
            return b""
        return stdout.readline()

    def _close(self) -> int:
        """End the process and return its exit status."""
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
