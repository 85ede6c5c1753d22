"""Parts of a step: their names in compiled programs, their costs, and the table of docs/gpu.md."""

import json
import re

import jax
import jax.numpy as jnp
import pytest

from tests.machine.compilers.test_schedule import ENTRY
from tests.train_helpers import ROOT
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.machine.compilers.predict import predict
from zaya_jax.ops.parts import OTHER, part, part_of


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


def test_the_page_shows_the_recorded_table():
    """Milliseconds, TFLOPs and GB of docs/gpu.md against benchmarks/gpu_roofline.json."""
    results = json.loads((ROOT / "benchmarks/gpu_roofline.json").read_text(encoding="utf-8"))["results"]
    h200, mi300x = (next(x for x in results if (x["gpu"], x["devices"]) == (gpu, 1)) for gpu in ("h200", "mi300x"))

    def times(row):
        return f"{1e3 * row['predicted_seconds']:,.0f} / {1e3 * row['roofline_seconds']:,.0f}"

    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)`: [^|]+ \| ([\d,]+ / [\d,]+) \| ([\d,]+ / [\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", page,
                      re.MULTILINE)  # fmt: skip
    expected = [(name, times(row), times(mi300x["parts"][name]), f"{row['tflop']:,.0f}", f"{row['gigabytes']:,.0f}")
                for name, row in h200["parts"].items()]  # fmt: skip
    assert rows == expected
    assert f"**{times(h200)}** | **{times(mi300x)}**" in page
    for row in (x for x in results if x["devices"] == 8):
        assert f"{row['predicted_seconds']:.2f} s on" in page
        assert f"({100 * row['mfu']:.1f} %" in page
