"""How a job ends follows from its exit records, then from statuses, and never from a line of output."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.aegis.signature_samples import SAMPLES
from zaya_jax.aegis.decision import decide, final_code
from zaya_jax.aegis.exit_codes import SupervisorExit
from zaya_jax.aegis.failure import FaultClass, Observation, RankEnd, Severity, find_failure
from zaya_jax.aegis.policy import Policy
from zaya_jax.aegis.signatures import observe_line
from zaya_jax.errors import Reason
from zaya_jax.run.progress_record import ExitRecord, Phase

RESTART = None
DONE, CONFIGURATION, PREEMPTED = SupervisorExit.DONE, SupervisorExit.CONFIGURATION, SupervisorExit.PREEMPTED
DO_NOT_REQUEUE, NO_CHECKPOINT = SupervisorExit.DO_NOT_REQUEUE, SupervisorExit.NO_CHECKPOINT
SUPERSEDED, INTERRUPTED = SupervisorExit.SUPERSEDED, SupervisorExit.INTERRUPTED
DIRECT, WRAPPED = "direct", "wrapped"  # whether the trainer is the command, or something stands between
POLICY = Policy()


def end(record, status, how=DIRECT, reason=Reason.OTHER, rank=0, was_killed=False):
    """An end by its record: 'none', 'missing' where one must be, 'running' without an exit record, or its status."""
    if record in ("none", "missing"):
        return RankEnd(rank, status, 9.0, was_killed=was_killed, expects_record=record == "missing")
    left = None if record == "running" else ExitRecord(record, "It says why.", True, int(8e9), reason)
    return RankEnd(rank, status, 9.0, 5, Phase.DATA if left is None else Phase.END, left, has_progress=True,
                   is_wrapped=how == WRAPPED, was_killed=was_killed)  # fmt: skip


def verdict(ends, signals=(), lines=(), seen=(), *, is_saved=True):
    """Exit code, action, delay and identity of the failure, as the supervisor finds them."""
    told = [each for line in lines if (each := observe_line("trainer", line, 0)) is not None]
    failure = find_failure(ends, seen, told, is_saved=is_saved)
    code = final_code(failure, signals)
    if failure is None or code is not None:
        return code, "stop", 0.0, None
    decision = decide([(0.0, failure)], POLICY)
    return decision.exit_code, decision.action, decision.delay, failure.same


def row(record, status, how=DIRECT, reason=Reason.OTHER, signals=(), saved=True, code=RESTART):
    return pytest.param(record, status, how, reason, signals, saved, code,
                        id=f"{record}-{status}-{how}-{reason.name}-{signals}-{saved}-{code}")  # fmt: skip


CRASHES = (1, 3, 94, 124, 137, 139, -6, -7, -9, -11, -13, -15)
TABLE = [
    # No trainer of zaya_jax kept a record: the status counts.
    row("none", 0, code=DONE),
    row("none", 2, code=CONFIGURATION),
    *(row("none", status, code=PREEMPTED) for status in (129, 130, 143)),
    *(row("none", status) for status in CRASHES),
    # Nor did a training command, whose trainer may have died before: only a status that is an error counts.
    row("missing", 0),
    row("missing", 2, code=CONFIGURATION),
    row("missing", 143, code=PREEMPTED),
    row("missing", 1),
    # A trainer that ended without an exit record was killed, whatever its command returned.
    *(row("running", status, how) for status in (0, 2, 129, 130, 143, *CRASHES) for how in (DIRECT, WRAPPED)),
    # It had finished: a pipe, a profiler or its own end may still have failed.
    *(row(0, status, how, code=DONE) for status in (0, 2, 143, *CRASHES) for how in (DIRECT, WRAPPED)),
    *(row(0, status, how, saved=False) for status in (0, 1) for how in (DIRECT, WRAPPED)),
    # It said why it stopped, and its command may hide that.
    *(row(2, status, WRAPPED, code=CONFIGURATION) for status in (0, 1, 2, 141, -9)),
    row(2, 2, code=CONFIGURATION),
    *(row(asked, status, WRAPPED, code=PREEMPTED) for asked in (129, 130, 143) for status in (0, 1, 124, asked)),
    *(row(asked, asked, code=PREEMPTED) for asked in (129, 130, 143)),
    *(row(1, status, WRAPPED) for status in (0, 1, 2, 143, -13)),
    row(1, 1),
    # It died of something else after it had said why.
    *(row(2, status) for status in (0, 1, -9, -11)),
    *(row(143, status) for status in (0, -11)),
    # The reason says what the status does not.
    *itertools.chain.from_iterable(
        (row(1, 1, reason=reason, code=code), row(1, 0, WRAPPED, reason, code=code), row(1, -9, reason=reason))
        for reason, code in ((Reason.NO_CHECKPOINT, NO_CHECKPOINT), (Reason.DEVICE_MEMORY, DO_NOT_REQUEUE))
    ),
    *(row(1, status, WRAPPED, reason) for status in (0, 1, 2) for reason in (
        Reason.DISK, Reason.SAVE_FAILED, Reason.HOST_MEMORY, Reason.NOT_FINITE, Reason.SPIKE, Reason.OTHER)),
    *(row(2, status, WRAPPED, Reason.PEERS_MISSING) for status in (0, 2)),
    row(2, 2, reason=Reason.PEERS_MISSING),
    # Others have resumed the run: a restart would take it from them, whatever else happened.
    *(row(3, status, how, code=SUPERSEDED) for status in (3, 0, -9, 143) for how in (DIRECT, WRAPPED)),
    *(row(3, 3, signals=signals, code=SUPERSEDED) for signals in ((15,), (2, 2))),
    # The supervisor was asked to stop.
    *(row(record, status, signals=(15,), code=PREEMPTED) for record, status in (
        (143, 143), ("running", -9), ("none", -15), ("none", 143), (1, 1), (2, 2))),
    *(row(record, status, signals=(1,), code=PREEMPTED) for record, status in ((129, 129), ("running", 0))),
    *(row(record, status, signals=(2,), code=INTERRUPTED) for record, status in ((130, 130), ("running", -2))),
    *(row(record, 0, signals=(15,), code=DONE) for record in (0, "none")),
    row(0, 0, signals=(15,), saved=False, code=PREEMPTED),
]  # fmt: skip


@pytest.mark.parametrize(("record", "status", "how", "reason", "signals", "saved", "code"), TABLE)
def test_record_status_and_signals_decide(record, status, how, reason, signals, saved, code):
    ends, everything = [end(record, status, how, reason)], [text for _, _, text in SAMPLES]
    for lines in ([], everything, everything[::-1]):
        assert verdict(ends, signals, lines, is_saved=saved)[0] == code


records = st.sampled_from(["none", "missing", "running", 0, 1, 2, 3, 129, 130, 143])
statuses = st.sampled_from([0, 1, 2, 3, 75, 93, 94, 129, 130, 137, 141, 143, -6, -9, -11, -13, -15])
how_ended = st.tuples(records, statuses, st.sampled_from([DIRECT, WRAPPED]), st.sampled_from(Reason), st.booleans())
samples = st.sampled_from([text for _, _, text in SAMPLES])
mixtures = st.tuples(st.text(max_size=5), samples, st.text(max_size=5)).map("".join)
texts = st.one_of(samples, mixtures, st.text(max_size=40))


@given(
    st.lists(how_ended, min_size=1, max_size=3), st.lists(st.sampled_from([1, 2, 15]), max_size=2),
    st.lists(texts, max_size=8), st.booleans(), st.lists(st.sampled_from(FaultClass), max_size=2),
)  # fmt: skip
def test_no_line_of_output_changes_what_is_done(ends, signals, lines, is_saved, faults):
    rows = [end(record, status, how, reason, rank, was_killed)
            for rank, (record, status, how, reason, was_killed) in enumerate(ends)]  # fmt: skip
    seen = [Observation("seen", fault, Severity.ERROR) for fault in faults]
    silent = verdict(rows, signals, (), seen, is_saved=is_saved)
    assert verdict(rows, signals, lines, seen, is_saved=is_saved) == silent


@given(st.lists(st.sampled_from([0, 1, -9, 141]), min_size=2, max_size=4), st.data())
def test_a_job_has_finished_once_every_process_has(statuses, data):
    """And one that ended without an exit record is enough to restart it, even if its command returns 0."""
    rows = [end(0, status, WRAPPED, rank=rank) for rank, status in enumerate(statuses)]
    assert verdict(rows)[0] is SupervisorExit.DONE
    lost = data.draw(st.integers(0, len(rows) - 1))
    rows[lost] = end("running", 0, WRAPPED, rank=lost)
    assert verdict(rows)[0] is None
    assert find_failure(rows, []).rank == lost


def test_a_line_explains_the_failure_of_its_process_alone():
    lines = ["step 3", "MemoryError: Unable to allocate 64.0 GiB"]
    told = [each for line in lines for rank in (0, 1) if (each := observe_line("trainer", line, rank)) is not None]
    random.Random(0).shuffle(told)
    failure = find_failure([end(1, 1, rank=1)], [], told)
    assert failure.explanation == "host-out-of-memory: MemoryError: Unable to allocate 64.0 GiB"
    assert failure.fault is FaultClass.CRASH
    assert find_failure([end(1, 1, rank=2)], [], told).explanation == ""
