"""Every leaf has a place, on any mesh, and the devices share what is stored."""

import math

import jax
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from zaya_jax.config import load_config
from zaya_jax.lab.predict.dry_run.estimate import simulated_programs
from zaya_jax.model.layers import MATRIX_ROLES
from zaya_jax.model.tree import shapes
from zaya_jax.parallel.mesh import AXES
from zaya_jax.parallel.rules import place_leaves

powers, any_size = st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 16, 24])
sizes = st.tuples(*[powers] * 4)
odd_sizes = st.tuples(any_size, any_size, powers, any_size)  # experts must divide


@pytest.fixture(scope="module")
def full():
    """Shapes and roles of ZAYA1-8B."""
    program = simulated_programs(load_config("configs/zaya1_8b.yaml"), 1024)[0]
    return shapes(program.model), program.roles


def abstract_mesh(sizes):
    return AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * 4)


@given(sizes=odd_sizes)
def test_every_leaf_is_split_evenly_and_never_along_layers(full, sizes):
    mesh = abstract_mesh(sizes)
    placed = place_leaves(*full, mesh)
    assert placed.keys() == full[0].keys()
    for name, place in placed.items():
        shape = full[0][name]
        local = NamedSharding(mesh, place.stored).shard_shape(shape)  # raises where an axis does not divide
        if name.startswith("blocks."):
            assert local[0] == shape[0], name
        expert = full[1][name] == "expert"
        if expert:
            assert local[1] == shape[1] // math.prod(mesh.shape[axis] for axis in place.own + place.experts_over), name
        assert place.own == (("expert",) if expert and mesh.shape["expert"] > 1 else ())
        parts = math.prod(mesh.shape[axis] for axis in place.split)
        assert math.prod(local) * parts == math.prod(shape), name
        matrix = name.startswith("blocks.") and full[1][name] in MATRIX_ROLES
        assert place.reduced_in_layers == (matrix and bool(place.gathers)), name
        fsdp, experts = mesh.shape["fsdp"], shape[1:2] if expert else ()
        divided = [*shape[-2:], *(count // math.prod(mesh.shape[axis] for axis in place.own) for count in experts)]
        assert place.by_layer == (matrix and fsdp > 1 and any(size % fsdp == 0 for size in divided)), name
        assert len(place.gathers) <= 1
        assert {*place.gathered, *(["fsdp"] if place.by_layer else []), *place.own} == set(place.split)


@given(sizes=sizes)
def test_matrices_are_split_over_all_devices(full, sizes):
    mesh = abstract_mesh(sizes)
    devices = math.prod(sizes)
    for name, place in place_leaves(*full, mesh).items():
        if full[1][name] in ("attention", "expert", "embedding") and devices <= 1024:
            assert set(place.split) == {axis for axis in AXES if mesh.shape[axis] > 1}, name


@pytest.mark.parametrize(("sizes", "gathered"), [((8, 1, 1, 1), True), ((1, 8, 1, 1), False), ((2, 4, 1, 1), True)])
def test_layers_gather_experts_alone_unless_fsdp_does(full, sizes, gathered):
    places = place_leaves(*full, abstract_mesh(sizes))
    experts = {f"blocks.0.mixture.experts.{name}" for name in ("gate_up", "down")}
    assert {name for name, place in places.items() if place.gathered_in_layers} == (experts if gathered else set())


@pytest.mark.parametrize(
    ("sizes", "experts_over", "over", "layer_axis", "gathers"),
    [
        ((8, 1, 1, 1), ("data",), (), None, ((-3, ("data",)),)),  # two of 16 experts on each device
        ((1, 8, 1, 1), ("fsdp",), (), -3, ()),
        ((2, 4, 1, 2), ("fsdp", "data", "context"), (), -3, ((-3, ("data", "context")),)),
        ((128, 8, 1, 1), ("fsdp",), ("data",), -3, ((-1, ("data",)),)),
        ((128, 1, 8, 1), (), ("data",), None, ((-1, ("data",)),)),
        ((1, 2, 8, 1), ("fsdp",), (), -3, ()),
        ((1024, 1, 1, 1), (), ("data",), None, ((-1, ("data",)),)),
    ],
)
def test_experts_are_split_along_their_own_axis_where_they_divide(full, sizes, experts_over, over, layer_axis, gathers):
    place = place_leaves(*full, abstract_mesh(sizes))["blocks.0.mixture.experts.gate_up"]
    assert (place.experts_over, place.over, place.layer_axis, place.gathers) == (
        experts_over, over, layer_axis, gathers
    )  # fmt: skip


def test_the_vocabulary_is_split_where_it_divides_and_the_width_where_it_does_not(full):
    for devices, axis in ((64, -2), (128, -2), (256, -1), (1024, -1)):
        place = place_leaves(*full, abstract_mesh((devices, 1, 1, 1)))["embedding"]
        assert (place.axis, place.over) == (axis, ("data",))


def test_a_leaf_too_narrow_for_all_devices_is_split_over_some_or_none():
    mesh = abstract_mesh((4, 8, 1, 1))
    leaves = place_leaves({"a": (8,), "b": (3,), "c": ()}, {"a": "norm", "b": "bias", "c": "scale"}, mesh)
    assert [(place.axis, place.over) for place in leaves.values()] == [(-1, ("fsdp",)), (None, ()), (None, ())]


@given(sizes=st.tuples(*[st.integers(1, 12)] * 4), rows=st.integers(1, 60), columns=st.integers(1, 60))
@example(sizes=(6, 4, 1, 1), rows=12, columns=12)  # of which 4 or 6 devices divide an axis, but not 24
def test_a_layer_lies_as_if_fsdp_and_expert_were_alone(sizes, rows, columns):
    """What is gathered in the loop over layers, and how much a device has of it, do not depend on other axes."""
    _, fsdp, expert, _ = sizes
    assume(12 % expert == 0)
    query, down = "blocks.0.attention.query", "blocks.0.mixture.experts.down"
    stacks = {query: (2, rows, columns), down: (2, 12, rows, columns)}, {query: "attention", down: "expert"}
    places, alone = (place_leaves(*stacks, abstract_mesh(degrees)) for degrees in (sizes, (1, fsdp, expert, 1)))
    for name, divided in ((query, (rows, columns)), (down, (rows, columns, 12 // expert))):
        leaf = places[name]
        assert leaf.by_layer == alone[name].by_layer == (fsdp > 1 and any(size % fsdp == 0 for size in divided))
        kept = [axis for axis in leaf.split if axis not in leaf.gathered]  # of the compute copy
        assert set(kept) == {*(["fsdp"] if leaf.by_layer else []), *leaf.own}
        assert leaf.layer_axis is None or stacks[0][name][leaf.layer_axis] % fsdp == 0
        NamedSharding(abstract_mesh(sizes), leaf.stored).shard_shape(stacks[0][name])  # raises where it does not divide


def test_momentum_lies_as_its_parameter_and_counters_lie_everywhere():
    program = simulated_programs(load_config("configs/tiny.yaml", ["parallel.fsdp=2"]), 4)[0]
    leaves, shardings, split = program.placement.leaves, program.placement.shardings(program.abstract_state), 0
    for path, sharding in jax.tree_util.tree_leaves_with_path(shardings):
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey) and key.key in leaves]
        if names and len(sharding.spec):
            assert sharding.spec == leaves[names[0]].stored
            split += 1
    assert split == 2 * len(leaves) + sum(role not in ("attention", "router", "expert")
                                                 for role in program.roles.values())  # fmt: skip
    assert all(not sharding.spec for sharding in jax.tree.leaves((shardings.balance, shardings.recent, shardings.step)))
