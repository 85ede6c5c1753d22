import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import assert_trees_close, random_model
from tests.train_helpers import CONFIG, MODEL, PLAIN, STEP, change, differing, fast_jit, leaves, make_program, setup
from tests.train_helpers import make_batch as any_batch
from zaya_jax.config import AdamWConfig, OptimizerConfig, ScheduleConfig, SourceConfig, SpikeConfig, Table
from zaya_jax.model.tree import balancing_biases, parameters, with_values
from zaya_jax.model.zaya import head
from zaya_jax.optim.balance import load_error
from zaya_jax.optim.build import OPTIMIZERS
from zaya_jax.train.spikes import REASONS
from zaya_jax.train.state import init_state
from zaya_jax.train.step import make_local_loss

COUNTERS = {".step", ".skipped"}


def mean_loss(params, balance, batch, config=CONFIG):
    """Mean cross-entropy over real tokens, written down plainly."""
    return loss_and_counts(params, balance, batch, config)[0]


def loss_and_counts(params, balance, batch, config=CONFIG):
    """`mean_loss`, and how many tokens each expert of each layer got."""
    model = with_values(make_program(config).model, {**params, **balance})
    flat = {name: array.reshape(-1, array.shape[-1]) for name, array in batch.items()}
    out = model(flat["tokens"], flat["segment_ids"])
    scores = jax.nn.log_softmax(head(model, out.hidden_bsd))
    losses = -jnp.take_along_axis(scores, flat["targets"][..., None], -1)[..., 0]
    return jnp.where(flat["loss_mask"], losses, 0).sum() / flat["loss_mask"].sum(), out.stats.expert_counts_le


make_batch = functools.partial(any_batch, STEP)
_plain = fast_jit(jax.value_and_grad(loss_and_counts, has_aux=True))


@functools.cache
def plain(scale=1):
    """Loss, gradient, its norm and the counts of the first batch, for the first state or a `scaled` one."""
    state = scaled(scale)
    (loss, counts), grads = _plain(state.params, state.balance, make_batch())
    grads = jax.device_get(grads)
    return float(loss), grads, float(np.sqrt(sum((g**2).sum() for g in grads.values()))), np.array(counts)


def scaled(scale):
    """The first state with a weight of the last norm so many times as large, and the gradient larger, too."""
    state = setup().state
    return dataclasses.replace(
        state, params={**state.params, "norm.weight": np.float32(scale) * state.params["norm.weight"]}
    )


@functools.cache
def first_step(scale=1):
    """State and metrics after one step."""
    return jax.device_get(setup().step(scaled(scale), make_batch()))


BARE = change(CONFIG, {"model": dataclasses.replace(MODEL, **PLAIN)})


def drawn(config):
    """Parameters and balancing biases at random."""
    model = random_model(config.model)
    return parameters(model), balancing_biases(model)


# --- what a step computes --------------------------------------------------------------------------------------


def test_a_step_is_a_pure_function():
    before, batch = leaves(setup().state), make_batch()
    first, second = (setup().step(setup().state, batch) for _ in range(2))
    assert not differing(first, second)
    assert not differing(before, leaves(setup().state))
    assert all(np.array_equal(array, make_batch()[name]) for name, array in batch.items())


def test_a_step_counts_itself_and_keeps_its_key():
    new, metrics = setup().step(setup().state, make_batch())
    assert (int(new.step), int(new.skipped), int(metrics["skipped"])) == (1, 0, 0)
    assert not differing(new.rng, setup().state.rng)
    assert differing(new.params, setup().state.params) == [f"['{name}']" for name in new.params]  # all are trained


SCALES = pytest.mark.parametrize("scale", [1, 30])  # the gradient is clipped at the second


@SCALES
def test_loss_and_gradient_are_those_of_the_mean_over_real_tokens(scale):
    """Of a step in two micro-batches, whose counts of real tokens differ; its first momentum shows the gradient."""
    loss, grads, norm, _ = plain(scale)
    new, metrics = first_step(scale)
    clip = min(1, STEP.optimizer.clip_norm / norm)
    assert (clip < 0.5) == (scale > 1)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)  # before it is clipped
    assert metrics["tokens"] == make_batch()["loss_mask"].sum()
    assert_trees_close(momentum(new), {name: clip * g for name, g in grads.items()}, rtol=1e-3)


def momentum(state):
    """After the first step the gradient, by name; Muon sums it, and Adam takes a part of it."""
    parts = {".trace": 1, ".mu": 1 - STEP.optimizer.adamw.b1}
    results = {}
    for path, x in jax.tree.leaves_with_path(state.opt_state):
        kind, _, name = jax.tree_util.keystr(path).rpartition("[")
        if part := parts.get(f".{kind.rpartition('.')[2]}"):
            results[name.strip("']")] = x / np.float32(part)
    return results


@SCALES
def test_norms_by_role_are_those_of_the_gradient_and_of_the_change(scale):
    _, grads, norm, _ = plain(scale)
    new, metrics = first_step(scale)
    before, squares = jax.device_get(scaled(scale).params), 0.0
    change = {name: new.params[name] - before[name] for name in before}
    for role in {setup().program.roles[name] for name in before}:
        names = [name for name in before if setup().program.roles[name] == role]
        for kind, arrays, least in (("grad", grads, 1e-4 * norm), ("update", change, 0)):
            expected = np.sqrt(sum((arrays[name] ** 2).sum() for name in names))
            assert metrics[f"{kind}_norm_by_role"][role] == pytest.approx(expected, rel=1e-3, abs=least), role
        squares += metrics["grad_norm_by_role"][role] ** 2
    assert np.sqrt(squares) == pytest.approx(metrics["grad_norm"], rel=1e-5)


def test_the_loss_is_summed_for_each_source_of_the_rows():
    config = change(BARE, {"data.sources": Table({name: SourceConfig(name) for name in "abc"})})
    (params, balance), batch = drawn(config), jax.tree.map(lambda a: a[0], make_batch())
    rows = np.arange(len(batch["tokens"])) % 2 * 2  # none of b
    batch |= {"sources": np.repeat(rows[:, None], batch["tokens"].shape[1], 1).astype(np.int16)}
    loss = fast_jit(make_local_loss(make_program(config)))
    sums = jax.device_get(loss(params, balance, batch)[1])
    for source in range(3):
        alone = batch | {"loss_mask": batch["loss_mask"] & (rows == source)[:, None]}
        expected = jax.device_get(loss(params, balance, alone)[1])
        assert sums["source_tokens"][source] == expected["tokens"] == alone["loss_mask"].sum()
        assert sums["source_loss"][source] == pytest.approx(expected["loss"], rel=1e-5)
    assert sums["source_loss"].sum() == pytest.approx(sums["loss"], rel=1e-6)


def test_positions_are_those_of_the_batch():
    loss, batch = float(first_step()[1]["loss"]), make_batch()
    for factor, offset, same in ((1, 3, True), (2, 0, False)):  # attention sees distances alone
        moved = batch | {"positions": batch["positions"] * factor + np.int32(offset)}
        moved_loss = float(setup().step(setup().state, moved)[1]["loss"])
        assert (moved_loss == pytest.approx(loss, rel=1e-5)) == same


@dataclasses.dataclass(frozen=True)
class WithOther(OptimizerConfig):
    other: AdamWConfig = dataclasses.field(default_factory=lambda: AdamWConfig(learning_rate=0.25))


def test_the_rate_that_is_logged_is_that_of_what_moves_the_matrices(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "other", OPTIMIZERS["adamw"])
    program = make_program(change(BARE, {"optimizer": WithOther(matrices="other")}))  # pyright: ignore[reportArgumentType]
    # The compiler leaves out what the rate does not need.
    rate = fast_jit(lambda batch: program.train_step(init_state(program), batch)[1]["learning_rate"])
    assert float(rate(any_batch())) == pytest.approx(0.25, rel=1e-3)


def test_the_rate_follows_the_schedule():
    """It warms up over two steps of 128 tokens; the update of a matrix, at a decay of nothing, is as large as it is."""
    state, rates, updates = setup().state, [], []
    for at in (0, 1, 2, 200):
        metrics = setup().step(dataclasses.replace(state, step=np.int32(at)), make_batch())[1]
        rates.append(float(metrics["learning_rate"]) / STEP.optimizer.muon.learning_rate)
        updates.append(float(metrics["update_norm_by_role"]["attention"]))
    assert rates == pytest.approx([0.5, 1, 1, 1])
    assert updates == pytest.approx([factor * updates[-1] for factor in rates], rel=1e-5)


def test_the_loss_falls_on_a_repeated_batch():
    state, step, losses = setup().state, setup().step, []
    for _ in range(30):
        state, metrics = step(state, make_batch())
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(np.log(CONFIG.model.vocab_size), abs=1)
    assert losses[-1] < 0.75 * losses[0]
    assert all(later < earlier for earlier, later in zip(losses[::5], losses[5::5], strict=False))


# --- balancing -------------------------------------------------------------------------------------------------


def test_biases_move_against_the_load_and_skip_stays_at_minus_one():
    state, batch = setup().state, make_batch()
    counts = plain()[3]
    new, metrics = setup().step(state, batch)
    (name,) = new.balance
    moved = np.array(new.balance[name]) - np.array(state.balance[name])
    mean = counts[:, :-1].sum(1, keepdims=True) / CONFIG.model.num_experts
    assert (counts[:, :-1] != mean).any()
    assert np.array_equal(np.sign(moved[:, :-1]), np.sign(mean - counts[:, :-1]))
    assert (np.array(new.balance[name])[:, -1] == -1).all()
    np.testing.assert_allclose(metrics["max_load"], counts[:, :-1].max(1) / mean[:, 0], rtol=1e-6)
    assert np.array_equal(metrics["expert_counts"], counts)
    np.testing.assert_allclose(metrics["skip_rate"], counts[:, -1] / counts.sum(1), rtol=1e-6)
    np.testing.assert_allclose(metrics["bias_range"], np.ptp(np.array(new.balance[name])[:, :-1], 1), rtol=1e-6)
    for _ in range(20):
        new, _ = setup().step(new, batch)
    assert (np.array(new.balance[name])[:, -1] == -1).all()


def test_the_entropy_of_the_load_is_one_where_it_is_even_and_zero_on_one_expert():
    def entropy_with(bias):
        state = setup().state
        balance = {name: jnp.broadcast_to(jnp.array(bias, jnp.float32), b.shape) for name, b in state.balance.items()}
        return setup().step(dataclasses.replace(state, balance=balance), make_batch())[1]

    collapsed = entropy_with([50, 0, 0, 0, -1])
    np.testing.assert_allclose(collapsed["load_entropy"], 0, atol=1e-6)
    np.testing.assert_allclose(collapsed["max_load"], CONFIG.model.num_experts, rtol=1e-6)
    skipping = entropy_with([0, 0, 0, 0, 50])
    np.testing.assert_allclose(skipping["skip_rate"], 1)
    share = plain()[3][:, :-1] / plain()[3][:, :-1].sum(1, keepdims=True)
    expected = -(share * np.log(np.maximum(share, 1e-30))).sum(1) / np.log(CONFIG.model.num_experts)
    np.testing.assert_allclose(first_step()[1]["load_entropy"], expected, rtol=1e-5)


def test_each_layer_gets_its_own_error_whatever_the_layer_pattern():
    pattern = {"model.layer_pattern": ("full", "sliding"), "model.num_layers": 4, "model.sliding_window": 4}
    config = change(CONFIG, pattern)
    biases = jax.eval_shape(balancing_biases, make_program(config).model)
    assert sorted(b.shape for b in biases.values()) == [(2, 5), (2, 5)]
    from zaya_jax.train.step import _split_by_stack

    counts = np.random.default_rng(0).integers(1, 9, (4, 5))
    dealt = fast_jit(lambda counts: _split_by_stack(load_error(counts), biases, config))(counts)
    for position in range(2):
        errors = dealt[f"blocks.{position}.mixture.router.balancing_bias"]
        for group in range(2):
            real = counts[group * 2 + position, :-1]
            np.testing.assert_allclose(errors[group, :-1], real / real.sum() - 0.25, atol=1e-6)


def test_metrics_stand_in_the_order_of_layers_whatever_the_layer_pattern():
    from zaya_jax.train.step import _expert_metrics

    ranges = np.arange(24.0)  # of layer l: l; twelve positions, of which the names do not sort as numbers
    stacks = [np.stack([np.zeros(24), ranges, np.full(24, -50)], 1)[position::12] for position in range(12)]
    balance = {f"blocks.{position}.mixture.router.balancing_bias": b for position, b in enumerate(stacks)}
    metrics = fast_jit(_expert_metrics)(np.ones((24, 3), np.int32), dict(sorted(balance.items())))
    np.testing.assert_allclose(metrics["bias_range"], ranges)


# --- steps that are not finite ---------------------------------------------------------------------------------


def poisoned(state, value):
    """A state with `value` in one weight, and what undoes it."""
    name = "blocks.0.attention.query"
    x = state.params[name]
    params = {**state.params, name: x.at[(0,) * x.ndim].set(value)}
    return dataclasses.replace(state, params=params), lambda state: dataclasses.replace(
        state, params={**state.params, name: x}
    )


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_step_that_is_not_finite_changes_nothing_but_the_counters(value):
    started, _ = setup().step(setup().state, make_batch())  # so that the optimizer has moments to lose
    state, heal = poisoned(started, value)
    first, metrics = setup().step(state, make_batch())
    assert not np.isfinite(metrics["loss"])
    assert not any(float(x) for x in metrics["update_norm_by_role"].values())
    assert set(differing(state, first)) == COUNTERS
    assert (int(first.step), int(first.skipped), int(metrics["skipped"])) == (2, 1, 1)
    second, metrics = setup().step(first, make_batch())
    assert set(differing(first, second)) == COUNTERS
    assert (int(second.step), int(second.skipped), int(metrics["skipped"])) == (3, 2, 2)
    healed = heal(second)
    good, metrics = setup().step(healed, make_batch())
    assert np.isfinite(metrics["loss"])
    assert (int(good.step), int(good.skipped), int(metrics["skipped"])) == (4, 0, 0)
    moved = {re.match(r"\.\w+", name)[0] for name in differing(healed, good)}
    assert moved == {".params", ".balance", ".opt_state", ".balance_state", ".step", ".skipped", ".recent"}


@functools.cache
def watchful():
    """A step that looks for spikes after four steps, at a rate that stays; and the state after twenty."""
    steady = dataclasses.replace(CONFIG.phases[0], schedule=ScheduleConfig("constant"))
    config = change(CONFIG, {"phases": (steady,), "train.spike": SpikeConfig(window=4)})
    program = make_program(config)
    step, state = fast_jit(program.train_step), fast_jit(lambda: init_state(program))()
    for _ in range(40):
        state, metrics = step(state, weighted(easy()))
    assert int(metrics["skip"]) == 0
    return step, state, float(metrics["loss"])


def easy():
    """One token over and over, which is soon predicted."""
    batch = make_batch()
    return batch | {"tokens": np.ones_like(batch["tokens"]), "targets": np.ones_like(batch["targets"])}


def weighted(batch, weight=1.0):
    """The mask as numbers, so that one can be none."""
    return batch | {"loss_mask": batch["loss_mask"].astype(np.float32) * np.float32(weight)}


@pytest.mark.soak
def test_a_poisoned_batch_leaves_what_a_run_without_it_has():
    step, state, loss = watchful()
    garbage, nothing = weighted(easy() | {"targets": make_batch(seed=1)["targets"]}), weighted(easy(), np.nan)
    for poison, reason in ((garbage, "loss spike"), (nothing, "not finite")):
        skipped, metrics = step(state, poison)
        assert REASONS[int(metrics["skip"])] == reason
        if reason == "loss spike":
            assert float(metrics["loss"]) > 100 * loss
        # The position has moved on; a spike's loss is kept beside the history.
        history = {".recent.skipped"} if reason == "loss spike" else set()
        assert set(differing(state, skipped)) == COUNTERS | history
        (after, _), (without, _) = step(skipped, weighted(easy())), step(state, weighted(easy()))
        assert set(differing(after, without)) == {".step"}


def test_a_gradient_that_is_not_finite_is_skipped_though_the_loss_is():
    state = scaled(1e25)  # the squares of the gradient are too large for fp32
    new, metrics = setup().step(state, make_batch())
    assert np.isfinite(metrics["loss"])
    assert not np.isfinite(metrics["grad_norm"])
    assert set(differing(state, new)) == COUNTERS


def test_a_batch_without_a_real_token_leaves_finite_numbers():
    batch = make_batch() | {"loss_mask": np.zeros_like(make_batch()["loss_mask"])}
    new, metrics = setup().step(setup().state, batch)
    assert (float(metrics["loss"]), float(metrics["tokens"])) == (0, 0)
    chex.assert_tree_all_finite(leaves(new))


# --- precision -------------------------------------------------------------------------------------------------


def test_bfloat16_computes_low_and_keeps_everything_else_in_fp32():
    config = change(STEP, {"train.compute_dtype": "bfloat16"})
    program = make_program(config)
    jaxpr, (new, metrics) = jax.make_jaxpr(program.train_step, return_shape=True)(setup().state, make_batch())
    chex.assert_trees_all_equal_dtypes(new, setup().state)
    chex.assert_type([*new.params.values(), *new.balance.values(), metrics["loss"]], jnp.float32)
    products = re.findall(r"\w+:(bf16|f32)\[[\d,]*\] = dot_general", str(jaxpr))
    assert len(products) > 10
    evaluation = fast_jit(program.evaluation_step)
    flat = jax.tree.map(lambda a: a[0], make_batch())
    sums = evaluation(setup().state.params, setup().state.balance, flat)
    low, high = float(sums["loss"] / sums["tokens"]), plain()[0]
    assert low != pytest.approx(high, rel=1e-6)
    assert low == pytest.approx(high, rel=1e-2)


def test_bfloat16_sums_the_gradient_of_a_repeated_token_in_fp32():
    """Where all rows of the embedding are equal, one token throughout or a new one at each position is the same input.

    Only the order of the sum over positions differs, which bf16 would round at each of its terms. Over the vocabulary
    the head's part of the gradient sums to zero.
    """
    config = change(BARE, {"train.compute_dtype": "bfloat16", "train.batch.micro_batch": 8})
    program, batch = make_program(config), any_batch(config)
    gradient = program.placement.gradient(make_local_loss(program))
    of_embedding = fast_jit(lambda *arguments: gradient(*arguments)[1]["embedding"])  # the compiler drops the others
    params, balance = drawn(config)
    embedding = np.asarray(params["embedding"])
    params["embedding"] = np.broadcast_to(embedding[0], embedding.shape)
    positions = np.arange(batch["tokens"].size, dtype=np.int32).reshape(batch["tokens"].shape)
    assert positions.max() < len(embedding)
    sums = [np.asarray(of_embedding(params, balance, batch | {"tokens": tokens}), np.float64).sum(0)
             for tokens in (np.zeros_like(positions), positions)]  # fmt: skip
    assert np.linalg.norm(sums[0] - sums[1]) < 1e-4 * np.linalg.norm(sums[1])
