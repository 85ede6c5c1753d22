"""The table of a layout has every parameter once, and its bytes are those that a device stores."""

import dataclasses
import functools
import math
import re
from collections import Counter

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType

from tests.train_helpers import ADAPTERS, MODEL, STEADY, STEP, make_program, on_devices
from zaya_jax.config import ParallelConfig, PhaseConfig
from zaya_jax.config.parallel import AXES
from zaya_jax.model.tree import is_stacked, name_in_layer, shapes
from zaya_jax.ops.registry import KernelSelection
from zaya_jax.ops.target import current_target
from zaya_jax.parallel.placement import make_placement
from zaya_jax.parallel.storage import storage_rows, storage_table
from zaya_jax.train.fit import _layouts
from zaya_jax.train.program import Programs

LAYOUT = ParallelConfig(data=3, fsdp=2)


@functools.cache
def programs():
    """Of all parameters, and of adapters beside frozen ones, on one device; what devices store, and its bytes."""
    made = [Programs(config, KernelSelection(current_target()), 1)[0] for config in (STEP, ADAPTERS)]
    return [(program, stored(program), bytes_of(program, stored(program))) for program in made]


def stored(program):
    """What devices store of parameters, as the callers of `storage_rows` have it."""
    return [program.abstract_state, program.abstract_base]


def bytes_of(program, tree, count=lambda x: x.size * x.dtype.itemsize):
    """Bytes of each parameter and its optimizer state, by its name in the layer."""
    sizes = Counter()
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        for name in {getattr(key, "key", None) for key in path} & program.placement.leaves.keys():
            sizes[name_in_layer(name) if is_stacked(name) else name] += count(x)
    return sizes


@given(sizes=st.tuples(*[st.integers(1, 12)] * 4).filter(lambda sizes: MODEL.num_experts % sizes[2] == 0))
@settings(max_examples=30)
def test_every_parameter_is_in_a_row_that_accounts_for_its_bytes(sizes):
    mesh, axes = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * 4), dict(zip(AXES, sizes, strict=True))
    used = {axis for axis, size in axes.items() if size > 1}
    for program, state, whole in programs():
        placement = make_placement(ParallelConfig(), mesh, {**shapes(program.model), **program.trained}, program.roles,
                                   "float32", program.placement.kernels)  # fmt: skip
        rows, counted = storage_rows(placement, state), Counter()
        text = storage_table(rows, axes)
        for row in rows:
            assert {*row.stored_over, *row.replicated_over} == used
            assert len(row.stored_over) + len(row.replicated_over) == len(used)
            assert row.bytes == sum(row.parameters.values())
            for name, size in row.parameters.items():
                counted[name] += size * math.prod(axes[axis] for axis in row.stored_over)
        # Each device has the embedding's counter of steps.
        assert counted == (pytest.approx(whole, rel=0, abs=4 * mesh.size) if used else {})
        assert bool(text) == bool(used)
        assert not re.search(r"\s0(\.0+)? \w?B\b", "\n".join(text))  # whatever its size
        assert max(map(len, text), default=0) <= 120 + 30 * (len(used) > 3)
        assert all(name in "\n".join(text) for name in counted)


def real_rows():
    """The table of a layout on six devices, and bytes that the first of them has of each parameter and in all."""
    program = make_program(dataclasses.replace(STEP, parallel=LAYOUT, train=dataclasses.replace(
        STEP.train, batch=dataclasses.replace(STEP.train.batch, tokens=6 * 32, micro_batch=None))), 6)  # fmt: skip
    abstract = [program.abstract_state.params, program.abstract_state.opt_state]
    state = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), abstract)
    return storage_rows(program.placement, stored(program)), bytes_of(
        program, state, lambda x: x.addressable_data(0).nbytes
    )


def test_the_bytes_are_those_of_the_arrays_of_a_device():
    rows, sizes = on_devices(8, "tests.parallel.test_storage:real_rows")
    assert {name: size for row in rows for name, size in row.parameters.items()} == sizes
    experts = next(row for row in rows if "mixture.experts.gate_up" in row.parameters)
    assert experts[:3] == (("fsdp",), ("data",), "fsdp each layer")
    assert [row.bytes for row in rows] == sorted((row.bytes for row in rows), reverse=True)
    text = storage_table(rows, {"data": 3, "fsdp": 2})
    assert text[0].split() == ["stored", "over", "replicated", "over", "per", "device", "gathered"]
    assert text[1].split()[:4] == ["fsdp", "2", "data", "3"]
    assert next(iter(experts.parameters)) in text[2]


def test_a_run_prints_the_table_of_each_layout_once():
    phases = [PhaseConfig(128, name=name, schedule=schedule, parallel=parallel) for name, schedule, parallel in (
        ("first", STEADY, None), ("same", None, None), ("split", None, ParallelConfig(fsdp=2)))]  # fmt: skip
    config, messages = dataclasses.replace(STEP, phases=tuple(phases)), []
    for some, devices in ((config, 2), (STEP, 1)):
        messages += _layouts(Programs(some, KernelSelection(current_target()), devices))
    heads = [messages.index(text) for text in ("Layout of phases.first:", "Layout of phases.split:")]
    assert heads == [at for at, text in enumerate(messages) if not text.startswith("  ")]
    assert "data each step" in "".join(messages[: heads[1]])
    assert "fsdp each layer" in "".join(messages[heads[1] :])
