import chex
import jax
import jax.numpy as jnp
import numpy as np

from tests.train_helpers import CONFIG, STEP, change, differing, leaves, make_program, setup, start


def test_a_program_allocates_nothing_and_names_every_parameter():
    program = make_program(CONFIG)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves((program.model, program.abstract_state)))
    assert program.roles.keys() == setup().state.params.keys()


def test_the_largest_shipped_size_costs_no_memory():
    big = {"hidden_size": 8192, "num_layers": 80, "vocab_size": 262272, "expert_size": 8192, "num_experts": 64}
    config = change(CONFIG, {f"model.{name}": value for name, value in big.items()})
    assert sum(x.size for x in make_program(config).abstract_state.params.values()) > 5e11


def test_a_run_starts_at_zero_with_fp32_masters():
    state = setup().state
    assert (int(state.step), int(state.skipped)) == (0, 0)
    chex.assert_type([state.step, state.skipped], jnp.int32)
    chex.assert_type([*state.params.values(), *state.balance.values()], jnp.float32)
    assert not any(np.any(x) for x in jax.tree.leaves((state.opt_state, state.balance_state)))
    for bias in state.balance.values():
        assert np.array_equal(bias, [[0, 0, 0, 0, -1]] * 2)


def test_the_seed_decides_and_the_rest_of_the_run_has_a_key_of_its_own():
    first, other = setup().state, start(change(STEP, {"seed": 1}))
    matrices = [name for name, x in leaves(first.params).items() if x.std() > 0]
    assert len(matrices) > 8
    assert set(matrices) <= set(differing(first.params, other.params))
    assert differing(first.rng, other.rng)
    assert differing(first.rng, jax.random.key(0))
