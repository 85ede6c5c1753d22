"""Whatever happens, the supervisor comes to an end: restarts are bounded, and each rule gives its code."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.aegis.decision import decide
from zaya_jax.aegis.exit_codes import SupervisorExit
from zaya_jax.aegis.failure import Failure, FaultClass
from zaya_jax.aegis.policy import Policy, RestartPolicy, load_policy
from zaya_jax.errors import InputError

POLICY = Policy()
KILLED = Failure(FaultClass.CRASH, "signal-SIGKILL", 0, 5, "", 5)
faults = st.builds(
    Failure, st.sampled_from(FaultClass), st.sampled_from(["a", "b"]), st.none() | st.integers(0, 3),
    st.integers(-1, 20), st.sampled_from(["", "x", "y"]), st.integers(-1, 20),
)  # fmt: skip


@given(st.lists(faults, min_size=40, max_size=40), st.floats(0, 500), st.floats(0, 0.999))
def test_any_sequence_of_failures_ends(failures, gap, jitter):
    history = []
    for index, failure in enumerate(failures):
        history.append((index * gap, failure))
        decision = decide(history, POLICY, jitter=jitter)
        assert 0 <= decision.delay <= 1.1 * max(POLICY.restart.delays)
        assert decision.reason
        if decision.exit_code is not None:
            return
    # 20 steps of progress, 3 more attempts at each, is the most that any sequence can have
    assert gap > 300


@given(st.lists(st.integers(0, 3600), min_size=1, max_size=60))
def test_restarts_stay_within_the_budget(times):
    history, restarts = [], []
    for step, time in enumerate(sorted(times)):
        history.append((float(time), dataclasses.replace(KILLED, step=step + 1, progress=step + 1)))
        decision = decide(history, POLICY)
        if decision.exit_code is None:
            restarts.append(time)
        else:
            assert decision.exit_code is SupervisorExit.BUDGET_SPENT
            break
    assert all(sum(time - 3600 < other <= time for other in restarts) <= POLICY.restart.per_hour for time in restarts)


def test_delays_grow_without_progress_and_start_over_with_it():
    policy = Policy(restart=RestartPolicy(no_progress=10, jitter=0.0))
    failures = [(0.0, KILLED)]
    delays = []
    for _ in range(5):
        delays.append(decide(failures, policy).delay)
        failures.append((0.0, KILLED))
    assert delays == [0.0, 5.0, 20.0, 60.0, 60.0]
    failures.append((0.0, dataclasses.replace(KILLED, progress=6)))
    assert decide(failures, policy).delay == 0.0


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (FaultClass.PREEMPTION, SupervisorExit.PREEMPTED),
        (FaultClass.CONFIGURATION, SupervisorExit.CONFIGURATION),
        (FaultClass.CHECKPOINT, SupervisorExit.NO_CHECKPOINT),
        (FaultClass.DEVICE_MEMORY, SupervisorExit.DO_NOT_REQUEUE),
        (FaultClass.GPU, SupervisorExit.RETRY_ELSEWHERE),
        (FaultClass.CRASH, None),
        (FaultClass.HANG, None),
        (FaultClass.HOST_MEMORY, None),
        (FaultClass.NETWORK, None),
    ],
)
def test_each_class_of_fault_has_its_code(fault, code):
    assert decide([(0.0, dataclasses.replace(KILLED, fault=fault))], POLICY).exit_code is code


def test_what_is_only_logged_restarts():
    failure = dataclasses.replace(KILLED, fault=FaultClass.GPU)
    assert decide([(0.0, failure)], POLICY, can_act=False).exit_code is None


def test_failures_with_the_same_words_at_other_steps_are_not_deterministic():
    failures = [(0.0, dataclasses.replace(KILLED, words="x", step=step, progress=step)) for step in range(1, 9)]
    assert decide(failures, POLICY).exit_code is None
    assert decide([*failures, failures[3]], POLICY).exit_code is SupervisorExit.DO_NOT_REQUEUE


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("restart: {delays: []}", "restart.delays is [], but must be a list of at least one number, none negative."),
        ("rules: {gpu: panic}", "rules.gpu is 'panic', but must be one of restart,"),
        ("log_only: [hangs]", "log_only is 'hangs', but must be a list of hang, crash,"),
        ("timeouts: {step: 3}", "The key timeouts.step is unknown."),
        ("timeouts: {data: -1}", "timeouts.data is -1.0, but must be greater than 0."),
    ],
)
def test_a_policy_that_cannot_be_followed_is_refused(tmp_path, text, said):
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as refused:
        load_policy(path)
    assert said in str(refused.value)


def test_what_has_been_trained_with_is_no_wrong_configuration():
    """A corpus that is away for a moment is refused like one that does not exist."""
    refused = Failure(FaultClass.CONFIGURATION, "exit-2", 0, -1, "Error: data.corpus is not a folder.", -1)
    assert decide([(0.0, refused)], POLICY).exit_code is SupervisorExit.CONFIGURATION
    history = [(0.0, KILLED), (1.0, refused), (2.0, refused)]
    assert decide(history, POLICY).exit_code is None
    assert decide([*history, (3.0, refused), (4.0, refused)], POLICY).exit_code is SupervisorExit.DO_NOT_REQUEUE
