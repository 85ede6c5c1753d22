"""Steps of an engine with layers of the 8B, compiled for GPUs that are not here: what each layer launches.

`python -m tests.lab.compilers.test_decode` prints launches and predictions for 24 layers.
"""

import dataclasses
import functools
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from zaya_jax.config import load_config
from zaya_jax.config.shipped import shipped
from zaya_jax.generate.sampling import Sampling
from zaya_jax.generate.steps import BLOCK, Rows, SlotState, _decode_shard
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.lab.measure.step_parts import random_model
from zaya_jax.lab.predict.compilers import compiled
from zaya_jax.lab.predict.compilers.gpus import GPUS
from zaya_jax.lab.predict.compilers.kernels import read_program
from zaya_jax.lab.predict.compilers.predict import launches, predict
from zaya_jax.lab.predict.compilers.toolchain import compile_program, load_compiler
from zaya_jax.model.zaya import init_cache, unrolled
from zaya_jax.ops.kernel_table import find_table
from zaya_jax.ops.registry import select_kernels

pytestmark = pytest.mark.compilers
GPU, CAPACITY, DTYPE = "h200", 1024, "bfloat16"


def compile_step(rows, layers):
    """The loop over steps of a block, as it was scheduled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "WORKER", "tests.lab.compilers.test_decode")
        with compiled.run_worker("decode", GPU, (str(rows), str(layers)), "The step cannot be compiled") as folder:
            return max(read_program("decode", GPU, folder).entry.loops(), key=launches)


def worker(rows, layers, folder):
    load_compiler(GPU)
    config = dataclasses.replace(load_config(shipped("zaya1_8b.yaml")).model, num_layers=layers)
    target = GPUS[GPU].target
    kernels = select_kernels(target, config, DTYPE, find_table(target, lambda _: None), None)
    model, cache = jax.eval_shape(
        lambda: (unrolled(random_model(config, DTYPE)), init_cache(config, rows, CAPACITY, DTYPE))
    )
    state = SlotState(cache, np.zeros(rows, np.int32), np.zeros((rows, config.vocab_size), bool))
    sampling = Sampling(*np.zeros((5, rows), np.float32))
    requests = Rows(np.zeros(rows, np.uint32), np.zeros(rows, np.int32), np.zeros(rows, np.int32), sampling)
    arguments = model, state, requests, np.zeros(1, np.int32), np.int32(BLOCK)
    compile_program("decode", functools.partial(_decode_shard, kernels.ops), arguments, GPU, folder, donated=(1,))


def test_a_layer_of_a_step_launches_32_kernels():
    assert launches(compile_step(8, 3)) - launches(compile_step(8, 2)) == 32  # the first layers differ


def main():
    for rows in (8, 64):
        (two, first), (three, second) = (
            (launches(loop), predict(loop, HARDWARE[GPU])) for loop in (compile_step(rows, layers) for layers in (2, 3))
        )
        fast, slow = (a + 22 * (b - a) for a, b in ((first.seconds, second.seconds), (first.most, second.most)))
        print(f"{rows} rows: {three - two} launches a layer; 24 layers {1e3 * fast:.2f} to {1e3 * slow:.2f} ms a step")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        worker(int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
    else:
        main()
