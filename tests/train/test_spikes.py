import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.train_helpers import fast_jit
from zaya_jax.config import SpikeConfig
from zaya_jax.train import spikes
from zaya_jax.train.spikes import (
    REASONS,
    append_skipped,
    append_step,
    classify_step,
    empty_history,
    reset_history,
)

CONFIG = SpikeConfig(window=20, threshold=6.0)
_judge, _remember = (
    fast_jit(function, static_argnums=static) for function, static in ((classify_step, 0), (append_step, ()))
)
_remember_skipped = fast_jit(append_skipped, static_argnums=0)


def after(values, config=CONFIG):
    """What is remembered after steps of these (loss, norm)."""
    recent = empty_history(config)
    for loss, norm in values:
        recent = _remember(recent, jnp.float32(loss), jnp.float32(norm))
    return recent


def expected(values, loss, norm, config=CONFIG):
    """The reason, written down plainly."""
    if not (np.isfinite(loss) and np.isfinite(norm)):
        return "not finite"
    last = np.array(values[-config.window :], np.float32).reshape(-1, 2)
    if len(last) < 16:
        return ""
    last = np.stack([last[:, 0], np.log(last[:, 1])])
    median = np.median(last, 1)
    deviation = 1.4826 * np.median(np.abs(last - median[:, None]), 1)
    limit = median + config.threshold * np.maximum(deviation, [0.01 * median[0], 0.1])
    if loss > limit[0]:
        return "loss spike"
    return "gradient spike" if np.log(norm) > limit[1] else ""


losses, norms = st.floats(0.5, 12, width=32), st.floats(0.125, 4, width=32)


@given(st.lists(st.tuples(losses, norms), max_size=50), st.one_of(st.floats(0.5, 200, width=32), st.just(np.nan)),
       st.one_of(st.floats(0.125, 500, width=32), st.just(np.inf)))  # fmt: skip
def test_a_step_is_judged_by_the_median_of_the_last_ones(values, loss, norm):
    reason = REASONS[int(_judge(CONFIG, after(values), jnp.float32(loss), jnp.float32(norm)))]
    near = [expected(values, loss * (1 + e), norm * (1 + e)) for e in (-1e-4, 1e-4)]  # fp32 against fp64
    assert reason in near


def test_each_reason_occurs():
    values = [(3 + 0.01 * (i % 7), 1 + 0.01 * (i % 5)) for i in range(30)]
    recent = after(values)
    cases = {(np.nan, 1): 1, (3, np.inf): 1, (300, 1): 2, (300, 100): 2, (3, 100): 3, (3.02, 1): 0, (0.1, 0.01): 0}
    for (loss, norm), reason in cases.items():
        assert int(_judge(CONFIG, recent, jnp.float32(loss), jnp.float32(norm))) == reason, (loss, norm)


def test_the_oldest_is_forgotten_first_and_a_new_phase_forgets_all():
    recent = after([(i + 1, 1) for i in range(33)])
    assert sorted(np.array(recent.values[0]).tolist()) == list(range(14, 34))
    assert int(recent.accepted) == 33
    kept, gone = reset_history(recent, jnp.bool_(False)), reset_history(recent, jnp.bool_(True))
    assert np.array_equal(kept.values, recent.values)
    assert not gone.values.any()
    assert int(gone.accepted) == 0


def test_a_window_of_nothing_judges_by_finiteness_alone():
    config = SpikeConfig(window=0)
    recent = after([(1, 1)] * 40, config)
    assert int(_judge(config, recent, jnp.float32(1e9), jnp.float32(1e9))) == 0
    assert int(_judge(config, recent, jnp.float32(np.nan), jnp.float32(1))) == 1


def test_a_short_window_judges_once_it_is_full():
    config = SpikeConfig(window=4, threshold=6.0)
    for steps, reason in ((3, 0), (4, 2)):
        recent = after([(1, 1)] * steps, config)
        assert int(_judge(config, recent, jnp.float32(100), jnp.float32(1))) == reason
    assert spikes.REASONS[2] == "loss spike"


def follow(values, config=CONFIG, recent=None):
    """The reason for each step in turn, and what is remembered in the end."""
    recent, reasons = empty_history(config) if recent is None else recent, []
    for loss, norm in values:
        step = jnp.float32(loss), jnp.float32(norm)
        reasons.append(int(_judge(config, recent, *step)))
        recent = _remember_skipped(config, recent, *step) if reasons[-1] else _remember(recent, *step)
    return reasons, recent


STEADY = [(3 + 0.01 * (i % 7), 1 + 0.01 * (i % 5)) for i in range(40)]
HIGHER = [(2 * loss, 3 * norm) for loss, norm in STEADY]


def test_skipped_steps_that_agree_become_the_new_baseline():
    reasons, recent = follow(STEADY + HIGHER)
    assert reasons == [0] * 40 + [2] * CONFIG.window + [0] * (40 - CONFIG.window)
    assert follow([(loss, norm) for loss, norm in STEADY[:5]], recent=recent)[0] == [0] * 5  # below is no spike
    assert follow([(60, 3)], recent=recent)[0] == [2]  # and far above one again


def test_skipped_steps_that_do_not_agree_do_not():
    rising = [(6 * 1.3**i, 1) for i in range(40)]
    assert follow(STEADY + rising)[0] == [0] * 40 + [2] * 40
    parted = HIGHER[:19] + STEADY[:1] + HIGHER[:19]  # never in a row
    assert follow(STEADY + parted)[0][40:] == [2] * 19 + [0] + [2] * 19
    broken = [*HIGHER[:19], (np.nan, 1), *HIGHER[:19]]
    assert follow(STEADY + broken)[0][40:] == [2] * 19 + [1] + [2] * 19
