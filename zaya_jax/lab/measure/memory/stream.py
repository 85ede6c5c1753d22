"""The triad in C with OpenMP, the named peer of the memory bandwidth on a CPU."""

import os
import shutil
import subprocess
from pathlib import Path

from zaya_jax.errors import InputError

FLAGS = ("-O3", "-march=native", "-fopenmp")
_SOURCE = """
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
  long count = atol(argv[1]), repeats = atol(argv[2]);
  float *a = malloc(count * sizeof(float)), *b = malloc(count * sizeof(float)), *c = malloc(count * sizeof(float));
#pragma omp parallel for
  for (long i = 0; i < count; i++) { a[i] = 1; b[i] = 2; c[i] = 0; }
  for (long k = 0; k <= repeats; k++) {
    double start = omp_get_wtime();
#pragma omp parallel for
    for (long i = 0; i < count; i++) c[i] = a[i] + 3 * b[i];
    if (k) printf("%.9f\\n", omp_get_wtime() - start);
  }
  for (long i = 0; i < count; i++) if (c[i] != 7) return 1;
  return 0;
}
"""


def compile_stream(folder: Path) -> tuple[Path, str]:
    """Compile the triad into `folder`; returns the program, and name, version and flags of the compiler.

    Raises:
      InputError: there is no C compiler with OpenMP.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise InputError("--stream needs a C compiler, but cc is not on the PATH. Install one, such as gcc.")
    source, program = folder / "triad.c", folder / "triad"
    source.write_text(_SOURCE, encoding="utf-8")
    command = [compiler, *FLAGS, str(source), "-o", str(program)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (no shell)
    if made.returncode:
        raise InputError(f"--stream: {compiler} {' '.join(FLAGS)} failed: {made.stderr.strip()[:300]}")
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)  # noqa: S603 (no shell)
    return program, f"{said.stdout.splitlines()[0]}; {' '.join(FLAGS)}"


def time_stream(program: Path, count: int, repeats: int) -> list[float]:
    """Return the seconds of each triad over arrays of `count` fp32 elements, on as many threads as this process has.

    Raises:
      RuntimeError: the result is wrong.
    """
    threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "OMP_PROC_BIND": "true"}
    command = [str(program), str(count), str(repeats)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | threads)  # noqa: S603
    if run.returncode:
        raise RuntimeError(f"The triad in C ended with status {run.returncode}.")
    return [float(line) for line in run.stdout.split()]
