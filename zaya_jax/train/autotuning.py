"""Keep XLA's choices of algorithms with the run: on GPUs, XLA times several for each product when it compiles.

Another process can choose otherwise, and its results then differ in their last bits. XLA holds its choices in the
process; compiling any program with an option reads them from a file, once per process, or writes them all.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jaxlib.version

from zaya_jax.errors import printable
from zaya_jax.run.files import start_text, write_atomically

FILE = "autotuning.txt"  # in the run folder
Call = Callable[[], object]
_LONGEST = 2**26  # bytes that are read
_READ, _WRITE = "xla_gpu_load_autotune_results_from", "xla_gpu_dump_autotune_results_to"


class Autotuning:
    """The choices that a run's programs were compiled with."""

    def __init__(self, folder: Path, is_kept: bool, writes: bool, check: Call, say: Callable[[str], object]) -> None:
        """Let this process choose as the run in `folder` did, if that was with this jaxlib on such a device.

        Choices are kept if `is_kept`: if XLA chooses by time. This process writes them if `writes`, after `check`; it
        `say`s if they cannot be used or kept.
        """
        self._path, self._writes, self._check, self._say = folder / FILE, is_kept and writes, check, say
        # A comment of XLA's text format.
        self._origin = f"# jaxlib {jaxlib.version.__version__}, {jax.devices()[0].device_kind}\n"
        self._kept = start_text(self._path, _LONGEST) if is_kept else ""
        if self._kept and not self._kept.startswith(self._origin):
            origin = self._kept.split("\n", 1)[0].removeprefix("# ")
            chosen = f"The algorithms in {self._path} were chosen with {origin}"
            self._say(f"{chosen}: results may differ in their last bits.")
            self._kept = ""
        if self._kept:
            with tempfile.TemporaryDirectory() as private:
                copy = Path(private, FILE)
                copy.write_text(self._kept, encoding="utf-8")
                self._compile(_READ, copy)

    def write(self) -> None:
        """Write the choices of all programs that this process has compiled so far."""
        if not self._writes:
            return
        with tempfile.TemporaryDirectory() as private:
            self._compile(_WRITE, Path(private, FILE))
            choices = self._origin + start_text(Path(private, FILE), _LONGEST)
        # A program from the compilation cache brings no choices, and some version may drop what was read.
        if len(choices) <= len(self._kept or self._origin):
            return
        self._check()
        try:
            write_atomically(self._path, choices)
            self._kept = choices
        except OSError as error:
            self._say(f"{self._path} cannot be written: {error.strerror}.")

    def _compile(self, option: str, path: Path) -> None:
        """Compile a program without content. Its path is new, so that jax does not take it from its cache."""
        try:
            jax.jit(lambda: 0, compiler_options={option: str(path)}).lower().compile()
        except jax.errors.JaxRuntimeError as error:  # another version's option
            self._say(f"XLA's choices of algorithms are not kept with the run: {printable(str(error), 200)}")
