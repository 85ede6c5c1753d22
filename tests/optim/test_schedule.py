import chex
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.optim.schedule import cosine_with_warmup


def factors(steps, warmup, final):
    return np.asarray(cosine_with_warmup(jnp.arange(60), steps=steps, warmup=warmup, final=final))[:steps]


@given(steps=st.integers(3, 60), part=st.floats(0, 0.9), final=st.floats(0, 1))
def test_rises_to_one_and_falls_to_the_end(steps, part, final):
    warmup = int(steps * part)
    f = factors(steps, warmup, final)
    chex.assert_type(f, jnp.float32)
    np.testing.assert_allclose(f[warmup], 1, rtol=1e-6)
    np.testing.assert_allclose(np.diff(f[: warmup + 1]), 1 / (warmup + 1), rtol=1e-4)
    assert (np.diff(f[warmup:]) <= 1e-6).all()
    assert f.min() >= 0
    assert f[0] > 0
    if warmup < steps - 1:
        np.testing.assert_allclose(f[-1], final, atol=1e-6)


def test_halfway_down_it_is_halfway():
    np.testing.assert_allclose(
        factors(21, 0, 0.2)[[0, 5, 10, 20]], [1, 0.2 + 0.4 * (1 + 0.5**0.5), 0.6, 0.2], rtol=1e-5
    )


def test_a_run_of_one_step_and_steps_past_the_end():
    assert factors(1, 0, 0.1) == 1
    np.testing.assert_allclose(cosine_with_warmup(jnp.asarray(99), steps=10, warmup=2, final=0.1), 0.1, rtol=1e-6)
