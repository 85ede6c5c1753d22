from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import random_values
from tests.train.test_step import mean_loss
from tests.train_helpers import CONFIG, fast_jit, make_batch, make_program
from zaya_jax.evaluate import heldout
from zaya_jax.evaluate.evaluator import ModelSnapshot
from zaya_jax.evaluate.heldout import HeldoutEvaluator, HeldoutLoss, heldout_loss
from zaya_jax.model.tree import is_balancing_bias


@given(nats=st.floats(0, 1e9), tokens=st.integers(1, 10**9), text_bytes=st.integers(1, 10**9))
def test_a_loss_is_spread_over_tokens_or_bytes(nats, tokens, text_bytes):
    loss = HeldoutLoss(nats, tokens)
    assert loss.nats_per_token * tokens == pytest.approx(nats)
    assert loss.bits_per_byte(text_bytes) * text_bytes * np.log(2) == pytest.approx(nats)
    assert HeldoutLoss(0.0, 0).nats_per_token == HeldoutLoss(0.0, 0).bits_per_byte(0) == 0


def snapshot(loss_sums):
    values = random_values(CONFIG.model)
    params, balance = ({name: x for name, x in values.items() if is_balancing_bias(name) == biases}
                       for biases in (False, True))  # fmt: skip
    return ModelSnapshot(params, balance, {}, make_program(CONFIG).placement, loss_sums)


@pytest.fixture(scope="module")
def model():
    return snapshot(fast_jit(make_program(CONFIG).evaluation_step))


def batch(seed):
    """The first four rows."""
    return jax.tree.map(lambda a: a[0], make_batch(seed=seed))


def test_batches_add_up_to_the_mean_over_all_their_tokens(model):
    batches = [batch(0), batch(1)]
    loss = heldout_loss(model, iter(batches))
    joined = {name: np.concatenate([b[name] for b in batches])[None] for name in batches[0]}
    assert loss.tokens == joined["loss_mask"].sum()
    expected = fast_jit(mean_loss)(model.params, model.balance, joined)
    assert loss.nats_per_token == pytest.approx(float(expected), rel=1e-5)


def test_rows_of_padding_add_nothing(model):
    padded, other = batch(0), batch(0)
    for array in padded.values():
        array[2:] = 0
    loss = heldout_loss(model, [padded])
    other["tokens"] = np.where(np.arange(4)[:, None] < 2, other["tokens"], 7)
    other["segment_ids"], other["loss_mask"] = padded["segment_ids"], padded["loss_mask"]
    assert heldout_loss(model, [other]) == loss
    assert loss.tokens == padded["loss_mask"].sum()
    assert heldout_loss(model, []) == HeldoutLoss(0.0, 0)


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
    model = snapshot(lambda *_, **__: {"loss": Running(), "tokens": np.float32(2)})
    assert heldout_loss(model, [batch(0)] * 9) == HeldoutLoss(9.0, 18)
    assert (Running.now, Running.most) == (0, 3)


def test_each_source_has_a_loss_of_its_own_and_all_have_one_together(model, monkeypatch):
    empty = {name: np.zeros_like(array) for name, array in batch(0).items()}
    batches = {"some": [batch(0), empty], "unread": [], "more": [batch(1)], "padding": [empty]}
    texts = {name: SimpleNamespace(loaded=own) for name, own in batches.items() if own}
    monkeypatch.setattr(heldout, "heldout_text", lambda config, prepared, name, limit, phase: texts.get(name))
    sources = {name: SimpleNamespace(name=name, manifest=SimpleNamespace(kind="tokens")) for name in batches}
    evaluator = HeldoutEvaluator(CONFIG, SimpleNamespace(sources=sources))
    scores = evaluator.evaluate(model)
    expected = {name: heldout_loss(model, batches[name]) for name in ("some", "more")}
    assert evaluator.losses == expected
    assert evaluator.total == HeldoutLoss(*map(sum, zip(*expected.values(), strict=True)))
    by_source = {name: loss.nats_per_token for name, loss in expected.items()}
    assert scores == {"heldout_loss": evaluator.total.nats_per_token, "heldout_loss_by_source": by_source}
