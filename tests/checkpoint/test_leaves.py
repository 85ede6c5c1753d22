import chex
import jax
import jax.numpy as jnp
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.test_store import abstract, make_state
from tests.train_helpers import CONFIG, differing, make_program
from zaya_jax.checkpoint.leaves import like, named


def test_names_are_paths_and_keys_are_their_data():
    found = named(make_state())
    assert {"params.blocks.0.query", "params.norm", "step", "rng"} < set(found)
    assert found["rng"].dtype == jnp.uint32
    assert "recent" not in found
    assert all(isinstance(name, str) and array.size for name, array in found.items())


@given(st.integers(0, 9))
def test_a_state_is_what_its_arrays_say_in_whatever_order(seed):
    state = make_state(seed)
    found = named(state)
    restored = like(abstract(state), dict(reversed(found.items())))
    assert not differing(restored, state)
    assert restored["recent"].shape == (0,)  # which was left out, since it has no element


def test_abstract_states_have_the_same_names_and_shapes():
    real, planned = named(make_state()), named(abstract(make_state()))
    chex.assert_trees_all_equal_shapes_and_dtypes(real, planned)
    assert all(x.sharding is not None for x in planned.values())


def test_no_two_leaves_of_a_training_state_have_one_name():
    state = make_program(CONFIG).abstract_state
    assert len(named(state)) == sum(leaf.size > 0 for leaf in jax.tree.leaves(state))
