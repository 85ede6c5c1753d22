"""The process that failed first is told from those that followed, and its end is put in the right class."""

import signal
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.aegis.failure import RankEnd, find_failure
from zaya_jax.aegis.hang import HangWatch, find_suspects
from zaya_jax.aegis.observation import FaultClass, Observation, Severity
from zaya_jax.aegis.policy import TimeoutPolicy
from zaya_jax.aegis.timeouts import Timeouts
from zaya_jax.errors import printable
from zaya_jax.run.progress_record import LastWords, Phase, Progress

NAN = float("nan")


def words(sentence, time, *, is_origin=True, status=1):
    return LastWords(status, sentence, is_origin, int(time * 1e9))


def test_finished_processes_are_no_failure():
    assert find_failure([RankEnd(0, 0, 1.0), RankEnd(1, 0, 2.0)], []) is None


@given(st.permutations(range(4)), st.sampled_from([-9, -11, 1]))
def test_the_origin_is_found_in_any_order(order, status):
    """Process `order[0]` fails; the others follow, and may even end before the supervisor sees the first end."""
    ends = [RankEnd(order[0], status, 5.0, 7, Phase.DATA, words("x", 4.9) if status == 1 else None)]
    ends += [RankEnd(rank, 1, 5.0 + place, 7, Phase.DEVICE_WAIT, words("lost", 5.0, is_origin=False))
             for place, rank in enumerate(order[1:3])]  # fmt: skip
    ends.append(RankEnd(order[3], -9, 8.0, 7, Phase.DEVICE_WAIT, None, was_killed=True))
    for shuffled in (ends, ends[::-1]):
        failure = find_failure(shuffled, [])
        assert (failure.rank, failure.fault, failure.progress) == (order[0], FaultClass.CRASH, 7)


def test_the_first_last_words_decide_between_two_origins():
    ends = [
        RankEnd(0, 1, 5.0, 3, Phase.END, words("second", 4.8)),
        RankEnd(1, 1, 5.1, 3, Phase.END, words("first", 4.7)),
    ]
    assert find_failure(ends, []).words == "first"


def test_a_loss_elsewhere_has_no_origin_here():
    ends = [RankEnd(0, 1, 5.0, 3, Phase.END, words("Process 9 on other was lost.", 5.0, is_origin=False))]
    failure = find_failure(ends, [])
    assert (failure.rank, failure.code) == (None, "peer-lost")


def test_a_process_that_its_peers_gave_up_on_hangs():
    """The others ended since it sent no heartbeat, and the supervisor had to kill it."""
    ends = [RankEnd(0, 1, 5.0, 3, Phase.END, words("Process 1 sent no heartbeat.", 5.0, is_origin=False)),
            RankEnd(1, -9, 8.0, 3, Phase.DATA, None, was_killed=True)]  # fmt: skip
    failure = find_failure(ends, [])
    assert (failure.fault, failure.code, failure.rank) == (FaultClass.HANG, "hang-data", 1)


@pytest.mark.parametrize(
    ("status", "observed", "fault", "code"),
    [
        (-9, None, FaultClass.CRASH, "signal-SIGKILL"),
        (-9, FaultClass.HOST_MEMORY, FaultClass.HOST_MEMORY, "seen"),
        (-11, FaultClass.HOST_MEMORY, FaultClass.CRASH, "signal-SIGSEGV"),
        (1, FaultClass.GPU, FaultClass.GPU, "seen"),
        (1, FaultClass.DISK, FaultClass.DISK, "seen"),
        (-7, FaultClass.DISK, FaultClass.DISK, "seen"),
        (-9, FaultClass.DISK, FaultClass.CRASH, "signal-SIGKILL"),
        (1, FaultClass.DEVICE_MEMORY, FaultClass.DEVICE_MEMORY, "seen"),
        (1, FaultClass.CHECKPOINT, FaultClass.CHECKPOINT, "seen"),
        (2, None, FaultClass.CONFIGURATION, "exit-2"),
        (143, FaultClass.GPU, FaultClass.PREEMPTION, "exit-143"),
        (77, None, FaultClass.CRASH, "exit-77"),
        (-63, None, FaultClass.CRASH, "signal-63"),
    ],
)
def test_an_end_is_put_in_its_class(status, observed, fault, code):
    seen = [] if observed is None else [Observation("seen", observed, Severity.ERROR)]
    failure = find_failure([RankEnd(0, status, 1.0)], seen)
    assert (failure.fault, failure.code) == (fault, code)


def test_a_warning_explains_nothing():
    seen = [Observation("seen", FaultClass.GPU, Severity.WARNING)]
    assert find_failure([RankEnd(0, -signal.SIGSEGV, 1.0)], seen).fault is FaultClass.CRASH


def progress(writes, phase=Phase.DEVICE_WAIT):
    return Progress(writes, 1, phase, 7, 0, NAN, NAN, (), (), None)


@pytest.mark.parametrize(
    ("ranks", "stopped", "suspects"),
    [
        ([9, 7], (), [1]),
        ([9, 7, 8, 7], (), [1, 3]),
        ([9, 9], (1,), [1]),
        ([7, 9], (1,), [1]),
        ([9, 9], (), [0, 1]),
        ([None, 3], (), [0]),
        ([3], (), [0]),
    ],
)
def test_the_process_that_hangs_is_told_from_those_that_wait(ranks, stopped, suspects):
    records = {index: None if writes is None else progress(writes) for index, writes in enumerate(ranks)}
    assert find_suspects(records, stopped) == suspects


def test_a_process_that_others_have_passed_hangs_by_the_timeout_of_its_own_phase(tmp_path):
    """The other evaluates, which may take long, but that is no excuse for one that is not there yet."""
    behind, ahead = progress(15), progress(16, Phase.EVALUATE)
    ranks = [SimpleNamespace(index=0, progress=ahead), SimpleNamespace(index=1, progress=behind)]
    watch = HangWatch(Timeouts(TimeoutPolicy(device_wait=0.1), tmp_path, ""), expects_records=True)
    found, start = None, time.monotonic()
    while found is None and time.monotonic() < start + 30:
        found = watch.look(ranks)
        time.sleep(0.01)
    assert (found.rank, found.phase, found.timeout) == (1, Phase.DEVICE_WAIT, 0.1)


def test_processes_that_stall_alike_are_not_told_apart_by_when_they_were_seen(tmp_path):
    ranks = [SimpleNamespace(index=index, progress=progress(9, Phase.DATA)) for index in range(3)]
    watch = HangWatch(Timeouts(TimeoutPolicy(data=0.1), tmp_path, ""), expects_records=True)
    found, start = watch.look(ranks[:1]), time.monotonic()
    while found is None and time.monotonic() < start + 30:
        time.sleep(0.03)
        found = watch.look(ranks)
    assert found.rank is None
    assert found.words.endswith("The cause seems to be all processes alike.")


@given(st.text(), st.integers(0, 50))
def test_evidence_is_one_printable_line(text, longest):
    line = printable(text, longest)
    assert len(line) <= longest
    assert line.isprintable()


@pytest.mark.parametrize(
    "sentence",
    [
        "Error: Process 3 of 4 did not reach --coordinator node1:8476 within 120 s; processes 0, 1, 2 did.",
        "Error: Process 0 cannot listen at --coordinator 127.0.0.1:8476: Address already in use.",
        "Error: run_dir (runs/tiny) is in use by another process; wait until it finishes.",
    ],
)
def test_a_process_that_came_too_early_is_not_bad_configuration(sentence):
    end = RankEnd(0, 2, 5.0, -1, Phase.END, words(sentence, 5.0, status=2))
    assert find_failure([end], []).fault is FaultClass.PEERS


def test_processes_that_had_to_be_killed_did_not_finish():
    assert find_failure([RankEnd(0, -9, 5.0, 3, was_killed=True)], []).code == "killed"
