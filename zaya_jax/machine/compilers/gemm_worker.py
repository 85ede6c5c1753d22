"""Compile the products of `machine gemm` for a GPU: `… compilers.gemm_worker CONFIG REQUEST GPU FOLDER`."""

import json
import os
import sys
from pathlib import Path

from zaya_jax.config import load_config
from zaya_jax.data.convert import end_with_parent
from zaya_jax.machine.compilers.gpus import GPUS
from zaya_jax.machine.compilers.kernel_worker import compile_program
from zaya_jax.machine.compilers.worker import load_compiler
from zaya_jax.machine.gemm.compiled import program_name
from zaya_jax.machine.gemm.sweep import Request, make_problems
from zaya_jax.ops.registry import select_kernels


def main(path: str, request: str, gpu: str, folder: str) -> None:
    """Compile the products of a `Request`, given as JSON, for a configuration, and write them into `folder`."""
    end_with_parent(os.getppid())
    load_compiler(gpu)
    config, wanted = load_config(path), Request(**json.loads(request))
    kernels = select_kernels(GPUS[gpu].target, config.model, wanted.dtype)
    for index, problem in enumerate(make_problems(config, wanted, kernels)):
        compile_program(program_name(index), problem.run, (*problem.arrays, *problem.integers), gpu, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
