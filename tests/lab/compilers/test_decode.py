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

from tests.lab.compilers.test_compiled import need_stand_ins
from tests.lab.compilers.test_kernels import check
from zaya_jax.config import load_config
from zaya_jax.config.shipped import shipped
from zaya_jax.generate.sampling import Sampling
from zaya_jax.generate.steps import BLOCK, Rows, SlotState, _decode_shard
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.lab.measure.step_parts import random_model
from zaya_jax.lab.predict.compilers import compiled
from zaya_jax.lab.predict.compilers.gpus import GPUS
from zaya_jax.lab.predict.compilers.hlo import shape_bytes
from zaya_jax.lab.predict.compilers.kernels import read_program
from zaya_jax.lab.predict.compilers.predict import is_launch, launches, predict
from zaya_jax.lab.predict.compilers.toolchain import compile_program, load_compiler
from zaya_jax.model.zaya import init_cache, unrolled
from zaya_jax.ops.experts import MOST_UNSORTED
from zaya_jax.ops.kernel_table import find_table
from zaya_jax.ops.registry import select_kernels

pytestmark = pytest.mark.compilers
CAPACITY, DTYPE = 1024, "bfloat16"


@functools.cache
def compile_step(gpu, rows, layers):
    """The loop over steps of a block, as it was scheduled, and what the kernels of the program need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "WORKER", "tests.lab.compilers.test_decode")
        with compiled.run_worker("decode", gpu, (str(rows), str(layers)), "The step cannot be compiled") as folder:
            program = read_program("decode", gpu, folder)
            return max(program.entry.loops(), key=launches), program


def worker(gpu, rows, layers, folder):
    load_compiler(gpu)
    config = dataclasses.replace(load_config(shipped("zaya1_8b.yaml")).model, num_layers=layers)
    target = GPUS[gpu].target
    kernels = select_kernels(target, config, DTYPE, find_table(target, lambda _: None), None)
    model, cache = jax.eval_shape(
        lambda: (unrolled(random_model(config, DTYPE)), init_cache(config, rows, CAPACITY, DTYPE))
    )
    state = SlotState(cache, np.zeros(rows, np.int32), np.zeros((rows, config.vocab_size), bool))
    sampling = Sampling(*np.zeros((5, rows), np.float32))
    requests = Rows(np.zeros(rows, np.uint32), np.zeros(rows, np.int32), np.zeros(rows, np.int32), sampling)
    arguments = model, state, requests, np.zeros(1, np.int32), np.int32(BLOCK)
    compile_program("decode", functools.partial(_decode_shard, kernels.ops), arguments, gpu, folder, donated=(1,))


@pytest.mark.parametrize("gpu", ["h200", "mi300x", "mi355x"])
def test_a_layer_of_a_step_launches_11_kernels(gpu):
    need_stand_ins(gpu)
    three, program = compile_step(gpu, 8, 3)
    assert launches(three) - launches(compile_step(gpu, 8, 2)[0]) == 11  # the first layers differ
    assert {"cca_mix_step", "router_step", "grouped_swiglu"} <= check({"decode": program}, gpu, {})
    copied = [x for x in three.instructions if x.opcode.startswith("copy") and shape_bytes(x.shape) > 2**16]
    assert copied == []  # neither caches nor parameters


@pytest.mark.parametrize(("rows", "sorts"), [(MOST_UNSORTED, 0), (MOST_UNSORTED + 1, 2)])
def test_few_rows_are_not_sorted(rows, sorts):
    loop, program = compile_step("h200", rows, 2)
    check({"decode": program}, "h200", {})
    assert [x.kernel for x in loop.instructions if is_launch(x)].count("class_sort") == sorts


def main():
    for gpu, rows in (("h200", 8), ("h200", 64), ("mi300x", 8)):
        (two, first), (three, second) = (
            (launches(loop), predict(loop, HARDWARE[gpu]))
            for loop, _ in (compile_step(gpu, rows, layers) for layers in (2, 3))
        )
        fast, slow = (a + 22 * (b - a) for a, b in ((first.seconds, second.seconds), (first.most, second.most)))
        times = f"24 layers {1e3 * fast:.2f} to {1e3 * slow:.2f} ms a step"
        print(f"{gpu}, {rows} rows: {three - two} launches a layer; {times}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        worker(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
    else:
        main()
