"""Evidence, collected before processes are killed: the stacks of all threads, the last lines, and the kernel's view."""

import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from zaya_jax.aegis.file_worker import FileWorker
from zaya_jax.aegis.processes import ProcessGroup, describe_process
from zaya_jax.run.files import write_atomically
from zaya_jax.run.writing import make_folder, remove

EVIDENCE = "evidence"
_KEPT = 20  # folders of evidence
_QUIET = 0.3  # seconds without new output after which the stacks are complete


def collect(
    folder: Path, attempt: int, group: ProcessGroup, pump: Callable[[float], bool], files: FileWorker, seconds: float
) -> list[str]:
    """Collect evidence about the processes of `group` in at most `seconds`, and let `files` write it.

    `pump` passes on output for at most that many seconds, and returns whether there was any.

    Returns:
      The paths of the files, relative to `folder`, that of the supervisor; none if they cannot be written in time.
    """
    deadline = time.monotonic() + seconds
    kernel = {rank.index: describe_process(rank.process.pid) for rank in group.running}
    for rank in group.running:
        if rank.progress is not None and not rank.outlives_trainer:  # it prints its stacks; another command would end
            rank.send(signal.SIGUSR1)
    quiet = time.monotonic() + 2 * _QUIET
    while (now := time.monotonic()) < min(quiet, deadline):
        if pump(0.05):
            quiet = now + _QUIET
    content: dict[str, bytes] = {}
    for rank in group.ranks:
        texts = [b"\n".join(stream.last_lines) for stream in rank.streams] + [kernel.get(rank.index, "").encode()]
        for name, text in zip(("stdout", "stderr", "kernel"), texts, strict=True):
            if text:
                content[f"process-{rank.index}.{name}"] = text + b"\n"
    written = files.submit(lambda: _write(folder, f"attempt-{attempt}", content))
    try:
        return written.result(max(deadline - time.monotonic(), _QUIET))
    except OSError:  # a disk that is full or silent must not keep a job from restarting
        return []


def _write(folder: Path, name: str, content: Mapping[str, bytes]) -> list[str]:
    """Write files to the folder `name` of evidence, and remove all but the newest ones; return their relative paths."""
    target = folder / EVIDENCE / name
    make_folder(target)
    for file, text in content.items():
        write_atomically(target / file, text)
    numbers = (path.name.removeprefix("attempt-") for path in target.parent.iterdir())
    for number in sorted(int(number) for number in numbers if number.isdecimal())[:-_KEPT]:
        remove(target.parent / f"attempt-{number}", ignore_errors=True)
    return [f"{EVIDENCE}/{name}/{file}" for file in content]
