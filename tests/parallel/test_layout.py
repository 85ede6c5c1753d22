"""A step on a layout has the collectives that it must, and computes what one device does.

Of which kind they are, along which axes, where, and how often they run.
"""

import dataclasses
import functools
import math
import re
from collections import Counter

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from tests.helpers import assert_close
from tests.hlo_helpers import collectives, compiled_evaluation, product_flops, text_of
from tests.parallel_helpers import (
    LAYOUTS,
    ODD,
    WIDE,
    gradient_text,
    run_step,
)
from tests.train_helpers import fast_jit, make_program, on_devices
from zaya_jax.config import BatchConfig, load_config
from zaya_jax.lab.predict.compilers.hlo import arrays
from zaya_jax.model.layers import MATRIX_ROLES
from zaya_jax.model.tree import is_stacked, shapes
from zaya_jax.ops.registry import KernelSelection
from zaya_jax.ops.target import current_target
from zaya_jax.parallel.mesh import BATCH_AXES, axis_sizes, make_mesh
from zaya_jax.train.program import Programs

MIXED, GATHERED = "fsdp_expert_context", "all_gather_zigzag4"
ALONE, THIRDS = "data", "data3_fsdp2"
REST = ("micro_batch", "fsdp", "hybrid", "expert4", GATHERED, "ring_zigzag4")

# How often what stands in a place runs in a step. A loop does all five micro-batches, or four of them: the last one
# stands alone if its layers reduce gradients, and the first one if each is reduced. No other loop with a collective has
# these numbers.
MICRO = 5
SEQUENCES = 24  # of a micro-batch
GROUPS = 2
LAYER = MICRO * GROUPS
HOP = 3  # of four devices in a ring
LOOPS = {MICRO: "", MICRO - 1: "", GROUPS: "layers", HOP: "hops"}

# Parameters by where they are. The temperatures are too few to split.
SPLIT, EXPERTS, MATRICES = 20, 2, 9
REST_OF_SPLIT = SPLIT - MATRICES


def config_of(name):
    """The layout's configuration; in fp64, which a CPU's collectives leave as it is.

    The steps that are compared with one device's rematerialize, that of the one device does not.
    """
    batch = BatchConfig(tokens=MICRO * SEQUENCES * WIDE.data.context, micro_batch=SEQUENCES)
    remat = {MIXED: "dots", ALONE: "none"}.get(name, "full")
    train = dataclasses.replace(WIDE.train, compute_dtype="float64", remat=remat, batch=batch)
    # What is left out has matrices and vectors that lie as others do.
    model = dataclasses.replace(WIDE.model, residual_scaling=False, router_layers=1)
    return dataclasses.replace(WIDE, model=model, parallel=(LAYOUTS | ODD)[name], train=train)


def of_gradients(names):
    """The collectives of each layout's gradient."""
    return {name: found_in(gradient_text(config_of(name)), name) for name in names}


def of_evaluation(name):
    """The collectives of a layout's forward pass alone."""
    with jax.enable_x64(True):
        return found_in(compiled_evaluation(config_of(name)), name)


def quick():
    """Everything that one process with eight devices has to compile: two steps, which it runs, and a known program."""
    runs = {name: run_step(config_of(name), math.prod(mesh_sizes(name).values())) for name in (MIXED, THIRDS)}
    return {name: run[:2] for name, run in runs.items()}, {name: found_in(run.text, name)
                                                           for name, run in runs.items()}, known_program()  # fmt: skip


def found_in(text, name):
    return collectives(text, mesh_sizes(name))


def mesh_sizes(name):
    return axis_sizes(ODD[name], 6) if name in ODD else axis_sizes(LAYOUTS[name], 8)


@functools.cache
def found(function, *arguments):
    return on_devices(8, f"tests.parallel.test_layout:{function}", *arguments)


def calls_of(name):
    return found("quick")[1][name] if name in (MIXED, THIRDS) else found("of_gradients", (ALONE, *REST))[name]


def stages_of(name):
    return [stage for stage in ("forward", "again", "backward") if stage != "again" or name != ALONE]


def place(call):
    return " ".join(filter(None, (LOOPS.get(trips, str(trips)) for trips in call.loops)))


def whole_matrices(over):
    """Of a step alone: Muon exchanges parts for whole matrices, and back; experts are whole."""
    return {("", "", "all-to-all", over): 2 * (MATRICES - EXPERTS)}


def once(over, leaves=REST_OF_SPLIT, scatters=1):
    """Masters gathered into the compute copy, gradients scattered; neither in the loop over micro-batches."""
    return {("", "", "all-gather", over): leaves, ("", "", "reduce-scatter", over): leaves * scatters}


def matrices(over, leaves=MATRICES, scatters=1):
    """The same of the layers' matrices, whose gradients are scattered in the layers of the last micro-batch."""
    return {("", "", "all-gather", over): leaves,
            ("layers", "backward", "reduce-scatter", over): leaves * scatters * GROUPS}  # fmt: skip


def layers():
    """Each layer gathered where it begins, in both passes since the layer is computed again; its gradient scattered."""
    return {("layers", "forward", "all-gather", "fsdp"): MATRICES * LAYER,
            ("layers", "again", "all-gather", "fsdp"): MATRICES * LAYER,
            ("layers", "backward", "reduce-scatter", "fsdp"): MATRICES * LAYER}  # fmt: skip


def experts():
    """Tokens and their choices gathered, outputs scattered; the gradients of both the other way round.

    The layer computed again scatters too: the gradient of a token's weight is that by its expert's output.
    """
    gathers = {("layers", stage, "all-gather", "expert"): 2 * LAYER for stage in ("forward", "again")}
    scatters = {("layers", stage, "reduce-scatter", "expert"): LAYER for stage in ("forward", "again", "backward")}
    return gathers | scatters | {("layers", "backward", "all-gather", "expert"): LAYER}


def halos():
    """Rows before a piece, from both neighbours. Their documents are the same in all layers: they leave the loop."""
    rows = {("layers", stage, "collective-permute", "context"): 2 * LAYER for stage in ("forward", "again", "backward")}
    return rows | {("", "", "collective-permute", "context"): 2 * MICRO}


def gathered_keys():
    """Keys and values together, and before the layers the documents of all keys."""
    return {("", "forward", "all-gather", "context"): MICRO,
            ("layers", "forward", "all-gather", "context"): LAYER,
            ("layers", "again", "all-gather", "context"): LAYER,
            ("layers", "backward", "reduce-scatter", "context"): LAYER}  # fmt: skip


def ring():
    """Keys and values, and with them their documents; backward the gradients of both go round too, and then home.

    The documents' way is the same in all layers, and for the forward pass moves out of their loop.
    """
    return Counter({("hops", "", "collective-permute", "context"): MICRO * HOP,
                    ("layers hops", "forward", "collective-permute", "context"): 2 * LAYER * HOP,
                    ("layers hops", "again", "collective-permute", "context"): 3 * LAYER * HOP,
                    ("layers hops", "backward", "collective-permute", "context"): 5 * LAYER * HOP,
                    ("layers", "backward", "collective-permute", "context"): 2 * LAYER})  # fmt: skip


def together(*parts):
    return dict(sum(map(Counter, parts), Counter()))


# Runs in a step by (place, stage, kind, axes) of all that is not a sum.
EXPECTED = {
    "data": together(once("data"), matrices("data")),
    "micro_batch": together(once("data", scatters=MICRO), matrices("data", scatters=MICRO)),
    "fsdp": together(once("fsdp"), layers()),
    "hybrid": together(once("data fsdp"), matrices("data"), layers()),
    "expert4": together(
        once("data expert"), matrices("data expert", MATRICES - EXPERTS), matrices("data", EXPERTS), experts(),
    ),
    GATHERED: together(once("data context"), matrices("data context"), halos(), gathered_keys()),
    "ring_zigzag4": together(once("data context"), matrices("data context"), halos(), ring()),
    MIXED: together(
        once("fsdp expert context"), matrices("expert context", MATRICES - EXPERTS), matrices("context", EXPERTS),
        layers(), experts(), halos(), gathered_keys(), whole_matrices("fsdp expert context"),
    ),
    # Three devices divide the vocabulary alone: of all else, three have what two have split.
    THIRDS: together(once("data fsdp", 1), once("fsdp", REST_OF_SPLIT - 1), layers(), whole_matrices("fsdp")),
}  # fmt: skip


def test_the_counts_are_those_of_the_model():
    program = make_program(config_of(ALONE))
    roles = program.roles
    split = [name for name, role in roles.items() if role != "temperature"]
    assert len(split) == SPLIT
    assert sum(role == "expert" for role in roles.values()) == EXPERTS
    assert sum(role in MATRIX_ROLES for role in roles.values()) == MATRICES
    assert all(is_stacked(name) for name, role in roles.items() if role in MATRIX_ROLES)
    assert program.model.config.num_groups == GROUPS


def replicated_parts(name):
    """Shapes of the parts of split parameters that several devices have, which sum their gradients once a step."""
    program = Programs(config_of(name), KernelSelection(current_target()), math.prod(mesh_sizes(name).values()))[0]
    mesh, leaves, params = program.placement.mesh, program.placement.leaves, shapes(program.model)
    used = {axis for axis, size in mesh.shape.items() if size > 1}
    return Counter(("f64", NamedSharding(mesh, leaf.stored).shard_shape(params[name]))
                   for name, leaf in leaves.items() if leaf.split and set(leaf.split) != used)  # fmt: skip


@pytest.mark.parametrize(
    "name", [MIXED, THIRDS, *(pytest.param(name, marks=pytest.mark.soak) for name in (ALONE, *REST))]
)
def test_each_collective_stands_where_it_must_and_runs_as_often(name):
    calls = calls_of(name)
    runs = Counter()
    for call in calls:
        if call.kind != "all-reduce":
            runs[place(call), call.stage, call.kind, " ".join(call.over)] += call.times
    stages = stages_of(name)
    assert dict(runs) == {call: times for call, times in EXPECTED[name].items() if call[1] in ("", *stages)}

    # Sums are of counts of tokens, of the loss and its tokens, and of the gradients of what devices share. The compiler
    # joins some of them, and so it is their arrays that are counted. A step has more of numbers: for its norms, the
    # squares of the gradient and of the change of each split parameter, since a device has a part of their elements.
    summed = Counter()
    for call in calls:
        if call.kind == "all-reduce":
            assert "layers" not in place(call)
            for array in arrays(call.shape):
                summed[array] += call.times
    temperatures = MICRO if name == "micro_batch" else 1
    counts = "s32" if name == "micro_batch" or mesh_sizes(name)["fsdp"] > 1 else "s64"  # `sum` makes wider integers
    numbers = summed.pop(("f64", ()))
    assert summed == {(counts, (2, 9)): 1, ("f64", (2, 1)): temperatures, **replicated_parts(name)}
    assert numbers == (2 + 2 * SPLIT if name in (MIXED, THIRDS) else 2)


@pytest.mark.soak
def test_the_forward_pass_alone_moves_halos_and_latent_keys_and_values_and_nothing_else():
    """docs/reference.md §4.1, §4.3: one gather of keys and values per layer, and a halo for each piece."""
    calls = found("of_evaluation", GATHERED)
    inside = [call for call in calls if place(call)]
    assert {(place(call), call.over, call.times) for call in inside} == {("layers", ("context",), 2)}
    assert moved(inside, GATHERED) == FORWARD
    assert RELEASED == (512, 2 * 1280 + 128)


@pytest.mark.parametrize("name", [MIXED, pytest.param(GATHERED, marks=pytest.mark.soak)])
def test_context_moves_as_much_again_and_back(name):
    def is_matrices(call):
        return len(arrays(call.shape)[0][1]) == 3  # the gradient of experts

    by_stage = {stage: [call for call in calls_of(name) if (place(call), call.over) == ("layers", ("context",))
                        and call.stage == stage and not is_matrices(call)]
                for stage in stages_of(name)}  # fmt: skip
    table = {stage: moved(calls, name) for stage, calls in by_stage.items()}
    assert table == {stage: BACKWARD if stage == "backward" else FORWARD for stage in stages_of(name)}
    print("\npass      collective          runs  of a     bytes here (fp64)  bytes of the 8B (bf16)")
    for stage, counts in table.items():
        for (kind, size), runs in counts.items():
            unit, released = ("piece", RELEASED[1]) if kind == "collective-permute" else ("token", RELEASED[0])
            print(f"{stage:10}{kind:20}{runs:4.0f}  {unit:9}{size:17,.0f} {2 * released:24,}")


def moved(calls, name):
    """How many collectives a layer has, by kind and bytes: of a token of the sequence, or of a piece's halo."""
    sequences = SEQUENCES // math.prod(mesh_sizes(name)[axis] for axis in BATCH_AXES)  # of a micro-batch, on a device
    counts = Counter()
    for call in calls:
        full_bytes = call.bytes * (call.devices if call.kind == "reduce-scatter" else 1)
        # Of a device's two pieces, one permutation carries the halos of the front ones, another of the back ones.
        units = sequences if call.kind == "collective-permute" else sequences * WIDE.data.context
        counts[call.kind, full_bytes / units] += 1
    # In a step they stand in two loops: those of the last micro-batch, and of the others.
    programs = 2 if len({call.loops for call in calls}) > 1 else 1
    return {what: count / programs for what, count in counts.items()}


def sizes_of(model):
    """Values of a token's latent keys and values, and of a piece's halo: two taps' rows, and one delayed half value."""
    rows = model.depthwise_kernel + model.grouped_kernel - 2
    return 2 * model.kv_size, rows * (model.query_size + model.kv_size) + model.kv_size // 2


HERE, RELEASED = sizes_of(WIDE.model), sizes_of(load_config("configs/zaya1_8b.yaml").model)
FORWARD = {("all-gather", 8 * HERE[0]): 1, ("collective-permute", 8 * HERE[1]): 2}
BACKWARD = {("reduce-scatter", 8 * HERE[0]): 1, ("collective-permute", 8 * HERE[1]): 2}


def test_the_released_model_gathers_a_kibibyte_a_token_and_layer():
    """Its forward pass at 131K as the last phase has it: what grows with the sequence is keys and values, in bf16."""
    config = load_config("configs/zaya1_8b.yaml")
    last = len(config.phases) - 1
    length = config.context_for(config.phases[last])
    parallel = config.parallel_for(config.phases[last])
    program = Programs(config, KernelSelection(current_target()), 8)[last]
    params, balance = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
                                   (program.abstract_state.params, program.abstract_state.balance))  # fmt: skip
    batch = {name: jax.ShapeDtypeStruct((1, length), "int32") for name in ("tokens", "targets", "segment_ids",
                                                                           "positions")}  # fmt: skip
    batch["loss_mask"] = jax.ShapeDtypeStruct((1, length), "bool")
    text = jax.jit(program.evaluation_step).trace(params, balance, batch).lower().as_text()
    pattern = r"stablehlo\.(all_gather|collective_permute|reduce_scatter|all_to_all)\b.*-> tensor<(\S+)>"
    results = Counter(re.findall(pattern, text))
    assert parallel.context == 8
    assert {what: count for what, count in results.items() if str(length) in what[1]} == {
        ("all_gather", f"1x{length}xi32"): 1,  # documents
        ("all_gather", f"1x{length}x2x256xbf16"): 1,
    }
    assert {what: count for what, count in results.items() if what[0] != "all_gather"} == {
        ("collective_permute", "1x2xi32"): 2,
        ("collective_permute", "1x2688xbf16"): 2,
    }


def known_program():
    """Sums over devices and products in loops of known ends, and one in a loop whose end depends on data."""
    mesh = make_mesh(LAYOUTS["hybrid"])

    def inner(x, _):
        return jax.lax.psum(x @ x, "fsdp"), None

    def outer(x, _):
        return jax.lax.ppermute(jax.lax.scan(inner, x, length=5)[0], "data", [(0, 1), (1, 0)]), None

    def region(x):
        x = jax.lax.scan(outer, x, length=3)[0]
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: 1 + jax.lax.pmax(x, ("data", "fsdp")), x)

    spec = jax.sharding.PartitionSpec()
    run = fast_jit(jax.shard_map(region, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    text = text_of(run.lower(jax.ShapeDtypeStruct((4, 4), "float32")))
    return collectives(text, mesh.shape), product_flops(text)


def test_loops_are_counted():
    calls, flops = found("quick")[2]
    assert {(call.kind, call.over, call.devices, call.loops) for call in calls} == {
        ("all-reduce", ("fsdp",), 4, (3, 5)),
        ("collective-permute", ("data",), 2, (3,)),
        ("all-reduce", ("data", "fsdp"), 8, (float("inf"),)),
    }
    assert len(calls) == 3
    assert flops == 3 * 5 * 2 * 4**3


@functools.cache
def step_alone():
    return run_step(config_of(ALONE), 1)


@pytest.mark.parametrize("name", [MIXED, THIRDS])
def test_a_step_on_a_layout_is_that_of_one_device(name):
    """Of both optimizers; the momentum after it is the gradient."""
    metrics, state = found("quick")[0][name]
    one = step_alone()
    counts = metrics["expert_counts"]
    assert (counts[:, -1] > 0).all()  # tokens that skip
    assert (counts[:, :-1].max(-1) > 2 * counts[:, :-1].mean(-1)).all()  # the routing compared is uneven
    np.testing.assert_array_equal(counts, one.metrics["expert_counts"])
    assert state.keys() == one.state.keys()
    assert_close((metrics, state), (one.metrics, one.state), 1e-8)
