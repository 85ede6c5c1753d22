import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.train.test_step import mean_loss
from tests.train_helpers import CONFIG, change, fast_jit, make_batch, setup
from zaya_jax.evaluate.heldout import HeldoutLoss, evaluate, evaluate_each, together
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.train.state import layout_of
from zaya_jax.train.step import make_evaluation_step


@given(nats=st.floats(0, 1e9), tokens=st.integers(1, 10**9), text_bytes=st.integers(1, 10**9))
def test_a_loss_is_spread_over_tokens_or_bytes(nats, tokens, text_bytes):
    held = HeldoutLoss(nats, tokens)
    assert held.nats_per_token * tokens == pytest.approx(nats)
    assert held.bits_per_byte(text_bytes) * text_bytes * math.log(2) == pytest.approx(nats)


def test_nothing_held_out_is_no_division_by_zero():
    assert HeldoutLoss(0.0, 0).nats_per_token == 0
    assert HeldoutLoss(0.0, 0).bits_per_byte(0) == 0


def one_device():
    return layout_of(CONFIG, setup().blueprint, make_mesh(devices=jax.devices()[:1]))


@pytest.fixture(scope="module")
def step():
    return fast_jit(make_evaluation_step(CONFIG, setup().blueprint, one_device().mesh))


def batch(seed):
    """The first four rows."""
    return jax.tree.map(lambda a: a[0], make_batch(seed=seed))


def test_batches_add_up_to_the_mean_over_all_their_tokens(step):
    batches, state = [batch(0), batch(1)], setup().state
    held = evaluate(step, state, iter(batches), one_device())
    joined = {name: np.concatenate([b[name] for b in batches])[None] for name in batches[0]}
    assert held.tokens == joined["loss_mask"].sum()
    expected = fast_jit(mean_loss)(state.params, state.balance, joined)
    assert held.nats_per_token == pytest.approx(float(expected), rel=1e-5)


class Running:
    """A sum that devices are still at, until it is asked for."""

    now, most = 0, 0

    def __init__(self):
        Running.now += 1
        Running.most = max(Running.most, Running.now)

    def __array__(self, *_, **__):
        Running.now -= 1
        return np.float32(1)


def test_devices_are_given_few_batches_at_once():
    def step(params, balance, batch):
        return {"loss": Running(), "tokens": np.float32(2)}

    held = evaluate(step, setup().state, [batch(0)] * 9, one_device())
    assert held == HeldoutLoss(9.0, 18)
    assert Running.now == 0
    assert Running.most == 3


def test_rows_of_padding_add_nothing(step):
    some = batch(0)
    for array in some.values():
        array[2:] = 0
    held = evaluate(step, setup().state, [some], one_device())
    other = batch(0)
    other["tokens"] = np.where(np.arange(4)[:, None] < 2, other["tokens"], 7)
    other["segment_ids"], other["loss_mask"] = some["segment_ids"], some["loss_mask"]
    assert evaluate(step, setup().state, [other], one_device()) == held
    assert held.tokens == some["loss_mask"].sum()
    assert evaluate(step, setup().state, [], one_device()) == HeldoutLoss(0.0, 0)


def test_the_state_is_read_alone(step):
    state = setup().state
    later = change(state, {"step": state.step + 50})
    layout = one_device()
    assert evaluate(step, later, [batch(0)], layout) == evaluate(step, state, [batch(0)], layout)


def test_each_source_has_a_loss_of_its_own_and_all_have_one_together(step):
    state, layout = setup().state, one_device()
    empty = {name: np.zeros_like(array) for name, array in batch(0).items()}
    batches = {"some": [batch(0), empty], "unread": [], "more": iter([batch(1)]), "padding": [empty]}
    losses = evaluate_each(step, state, batches, layout)
    assert list(losses) == ["some", "more"]
    assert losses["some"] == evaluate(step, state, [batch(0)], layout)
    assert losses["more"] == evaluate(step, state, [batch(1)], layout)
    whole = together(losses)
    assert whole.tokens == losses["some"].tokens + losses["more"].tokens
    assert whole.nats == pytest.approx(evaluate(step, state, [batch(0), batch(1)], layout).nats, rel=1e-9)
    assert together({}) == HeldoutLoss(0.0, 0)
