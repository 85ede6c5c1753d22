"""Parts of a step: their names in compiled programs, their costs, and the table of docs/gpu.md."""

import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jaxlib._hlo import hlo_module_from_text

from tests.lab.compilers.test_schedule import ENTRY
from tests.train_helpers import ROOT
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.lab.predict.compilers.hlo import parse, walk
from zaya_jax.lab.predict.compilers.predict import instruction_part, instruction_work, is_launch, predict
from zaya_jax.lab.predict.step_time import span
from zaya_jax.ops.parts import OTHER, part, part_of
from zaya_jax.train.profiler import program_text


@pytest.mark.parametrize(("path", "name"), [
    ("jit(train_step)/jvp(layers)/while/body/attention/dot_general", "attention"),
    ("jit(train_step)/transpose(jvp(layers))/while/body/attention/cca_mix/mul", "cca_mix"),
    ("jit(train_step)/jvp(attention)/norm_of_something/mul", "attention"),
    ("jit(train_step)/optimizer", "optimizer"),
    ("loss/while", "loss"),
    ("jit(train_step)/optimizers/add", OTHER),
    ("", OTHER),
])  # fmt: skip
def test_the_innermost_name_counts(path, name):
    assert part_of(path) == name


def test_gradients_belong_to_the_part_of_their_function():
    def function(x):
        with part("experts"):
            y = jnp.sin(x)
            with part("router"):
                return jnp.exp(y * x).sum()

    text = jax.jit(jax.grad(function)).lower(jnp.ones(8)).compile().as_text()
    names = {part_of(name) for name in re.findall(r'op_name="(jit[^"]*/(?:exp|cos|mul))"', text)}
    assert names == {"experts", "router"}


def test_parts_add_up_to_the_step_without_its_network():
    prediction = predict(ENTRY, HARDWARE["h200"])
    busy = prediction.seconds - prediction.exposed_seconds
    assert sum(cost.seconds for cost in prediction.parts.values()) == pytest.approx(busy)
    assert all(0 <= cost.roofline < cost.seconds for cost in prediction.parts.values())
    assert prediction.parts["layers"].bytes >= 80 * 2 * 2 * 1024**2  # a slice of a stack in each layer


# XLA gives no name to copies that it adds, and copies slices beside other work.
UNNAMED = """\
HloModule jit_train_step, is_scheduled=true

%slice (param: f32[8,1024]) -> f32[1,1024] {
  %param = f32[8,1024]{1,0} parameter(0)
  %zero = s32[] constant(0)
  ROOT %slice.1 = f32[1,1024]{1,0} dynamic-slice(%param, %zero, %zero), dynamic_slice_sizes={1,1024}
}

%layers (arg: (f32[8,1024], f32[8,1024])) -> (f32[8,1024], f32[8,1024]) {
  %arg = (f32[8,1024]{1,0}, f32[8,1024]{1,0}) parameter(0)
  %stack = f32[8,1024]{1,0} get-tuple-element(%arg), index=0
  %async-start = ((f32[8,1024]{1,0}), f32[1,1024]{1,0}, u32[]) fusion-start(%stack), kind=kLoop, calls=%slice
  %row = f32[1,1024]{1,0} fusion-done(%async-start)
  ROOT %out = (f32[8,1024]{1,0}, f32[8,1024]{1,0}) tuple(%stack, %stack)
}

%condition (arg.1: (f32[8,1024], f32[8,1024])) -> pred[] {
  %arg.1 = (f32[8,1024]{1,0}, f32[8,1024]{1,0}) parameter(0)
  ROOT %never = pred[] constant(false)
}

ENTRY %main (p0: f32[8,1024], p1: f32[8,1024]) -> f32[8,1024] {
  %p0 = f32[8,1024]{1,0} parameter(0)
  %p1 = f32[8,1024]{1,0} parameter(1)
  %zeros = f32[8,1024]{0,1} copy(%p0)
  %tuple = (f32[8,1024]{1,0}, f32[8,1024]{1,0}) tuple(%zeros, %p1)
  %while = (f32[8,1024]{1,0}, f32[8,1024]{1,0}) while(%tuple), condition=%condition, body=%layers, metadata={op_name="jit(train_step)/accumulation/layers/while"}
  %sum = f32[8,1024]{1,0} get-tuple-element(%while), index=1
  %norm = f32[8,1024]{1,0} custom-call(%sum, %p0), custom_call_target="x", metadata={op_name="jit(train_step)/optimizer/add"}
  ROOT %result = f32[8,1024]{0,1} copy(%norm)
}
"""  # noqa: E501


def test_what_xla_adds_belongs_to_its_loop_or_to_what_it_is_next_to():
    entry = parse(UNNAMED)
    found = {x.name: instruction_part(place, x) for place in walk(entry) for x in place.instructions if is_launch(x)}
    assert found == {"zeros": "layers", "async-start": "layers", "norm": "optimizer", "result": "optimizer"}
    assert OTHER not in predict(entry, HARDWARE["h200"]).parts
    (loop,) = entry.loops()
    assert instruction_work(loop, loop.instructions[2]).bytes == 2 * 4 * 1024  # what the copy reads and writes


def test_the_text_of_a_traced_program_names_copies_of_slices_as_the_trace_does():
    module = hlo_module_from_text(UNNAMED)
    (name,) = (x.name for c in module.computations() for x in c.instructions() if x.opcode.name == "kFusion")
    assert f"%{name} " not in module.to_string()
    compiled = SimpleNamespace(as_text=module.to_string, runtime_executable=lambda: None)
    assert program_text(compiled) == module.to_string()  # a version without these classes
    compiled.runtime_executable = lambda: SimpleNamespace(hlo_modules=lambda: [module])
    named = parse(program_text(compiled))
    assert [x.name for place in walk(named) for x in place.instructions if x.opcode == "fusion-start"] == [name]
    assert predict(named, HARDWARE["h200"]).parts == predict(parse(UNNAMED), HARDWARE["h200"]).parts


def test_the_page_shows_the_recorded_table():
    """Milliseconds, TFLOPs and GB of docs/gpu.md against benchmarks/gpu_roofline.json."""
    results = json.loads((ROOT / "benchmarks/gpu_roofline.json").read_text(encoding="utf-8"))["results"]
    h200, mi300x = (next(x for x in results if (x["gpu"], x["devices"]) == (gpu, 1)) for gpu in ("h200", "mi300x"))

    def times(row):
        ends = span((row["predicted_seconds"], row["most_seconds"]), lambda seconds: f"{1e3 * seconds:,.0f}")
        return f"{ends} / {1e3 * row['roofline_seconds']:,.0f}"

    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    cells = r" \| ([\d,to ]+ / [\d,]+)" * 2 + r" \| ([\d,]+)" * 2
    rows = re.findall(rf"^\| `(\w+)`: [^|]+{cells} \|$", page, re.MULTILINE)
    expected = [(name, times(row), times(mi300x["parts"][name]), f"{row['tflop']:,.0f}", f"{row['gigabytes']:,.0f}")
                for name, row in h200["parts"].items()]  # fmt: skip
    assert rows == expected
    assert f"**{times(h200)}** | **{times(mi300x)}**" in page
    for row in (x for x in results if x["devices"] == 8):
        assert f"{row['predicted_seconds']:.2f} s on" in page
        assert f"({100 * row['mfu']:.1f} %" in page
