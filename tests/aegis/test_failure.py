"""The process that failed first is told from those that followed, and its end is put in the right class."""

import signal
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.aegis.failure import FaultClass, Observation, RankEnd, Severity, find_failure
from zaya_jax.aegis.hang import WAITING, HangWatch, Sample, find_hang, find_suspects
from zaya_jax.aegis.policy import TimeoutPolicy
from zaya_jax.aegis.timeouts import Timeouts
from zaya_jax.errors import Reason, printable
from zaya_jax.run.progress_record import ExitRecord, Phase, Progress

NAN = float("nan")


def ended(rank, status, time, *, step=-1, phase=Phase.END, said=None, followed=False, reason=Reason.OTHER, **how):
    """A trainer that ended: with an exit record if it `said` a sentence, `followed` if it lost another process."""
    record = None if said is None else ExitRecord(status, said, not followed, int(time * 1e9), reason)
    return RankEnd(rank, status, time + 0.1, step, phase, record, has_progress=True, **how)


@given(st.permutations(range(4)), st.sampled_from([-9, -11, 0, 1]))
def test_the_origin_is_found_in_any_order(order, status):
    """Process `order[0]` fails; the others follow, and may even end before the supervisor sees the first end."""
    ends = [ended(order[0], status, 5.0, step=7, phase=Phase.DATA, said="x" if status == 1 else None)]
    ends += [ended(rank, 1, 5.0 + place, step=7, said="lost", followed=True) for place, rank in enumerate(order[1:3])]
    ends.append(ended(order[3], -9, 8.0, step=7, phase=Phase.DEVICE_WAIT, was_killed=True))
    for shuffled in (ends, ends[::-1]):
        failure = find_failure(shuffled, [])
        assert (failure.rank, failure.fault, failure.progress) == (order[0], FaultClass.CRASH, 7)


def test_the_first_exit_record_decides_between_two_origins():
    ends = [ended(0, 1, 4.8, step=3, said="second"), ended(1, 1, 4.7, step=3, said="first")]
    assert find_failure(ends, []).words == "first"


def test_a_loss_elsewhere_has_no_origin_here():
    failure = find_failure([ended(0, 1, 5.0, step=3, said="Process 9 on other was lost.", followed=True)], [])
    assert (failure.rank, failure.code) == (None, "peer-lost")


def test_a_process_that_its_peers_gave_up_on_hangs():
    """The others ended since it sent no heartbeat, and the supervisor had to kill it."""
    ends = [ended(0, 1, 5.0, step=3, said="Process 1 sent no heartbeat.", followed=True),
            ended(1, -9, 8.0, step=3, phase=Phase.DATA, was_killed=True)]  # fmt: skip
    failure = find_failure(ends, [])
    assert (failure.fault, failure.code, failure.rank) == (FaultClass.HANG, "hang-data", 1)


@pytest.mark.parametrize(
    ("status", "observed", "fault", "code"),
    [
        (-9, None, FaultClass.CRASH, "signal-SIGKILL"),
        (-9, FaultClass.HOST_MEMORY, FaultClass.HOST_MEMORY, "seen"),
        (137, FaultClass.HOST_MEMORY, FaultClass.HOST_MEMORY, "seen"),
        (-11, FaultClass.HOST_MEMORY, FaultClass.CRASH, "signal-SIGSEGV"),
        (1, FaultClass.GPU, FaultClass.GPU, "seen"),
        (1, FaultClass.DISK, FaultClass.DISK, "seen"),
        (-7, FaultClass.DISK, FaultClass.DISK, "seen"),
        (-9, FaultClass.DISK, FaultClass.CRASH, "signal-SIGKILL"),
        (77, None, FaultClass.CRASH, "exit-77"),
        (-63, None, FaultClass.CRASH, "signal-63"),
    ],
)
def test_what_the_machine_shows_decides_between_ends_without_a_record(status, observed, fault, code):
    seen = [] if observed is None else [Observation("seen", observed, Severity.ERROR)]
    for end in (RankEnd(0, status, 1.0), ended(0, status, 1.0, step=3, phase=Phase.DATA)):
        failure = find_failure([end], seen)
        assert (failure.fault, failure.code) == (fault, code)


@pytest.mark.parametrize(("end", "observed", "severity", "fault"), [
    # Killed by the kernel behind a pipe.
    (ended(0, 0, 1.0, step=3, phase=Phase.DATA, is_wrapped=True), FaultClass.HOST_MEMORY, Severity.ERROR,
     FaultClass.HOST_MEMORY),
    # A broken GPU outranks the reason of the trainer.
    (ended(0, 1, 5.0, said="x", reason=Reason.DEVICE_MEMORY), FaultClass.GPU, Severity.ERROR, FaultClass.GPU),
    # But it damages no checkpoint, and fills no disk.
    (ended(0, 1, 5.0, said="x", reason=Reason.NO_CHECKPOINT), FaultClass.GPU, Severity.ERROR, FaultClass.CHECKPOINT),
    (ended(0, 1, 5.0, said="x", reason=Reason.DISK), FaultClass.GPU, Severity.ERROR, FaultClass.DISK),
    # A warning explains nothing.
    (RankEnd(0, -signal.SIGSEGV, 1.0), FaultClass.GPU, Severity.WARNING, FaultClass.CRASH),
])  # fmt: skip
def test_what_the_machine_shows_and_what_the_trainer_left_are_weighed(end, observed, severity, fault):
    failure = find_failure([end], [Observation("seen", observed, severity, device=3)])
    assert (failure.fault, failure.device) == (fault, 3 if fault is FaultClass.GPU else failure.device)


def progress(writes, phase=Phase.DEVICE_WAIT):
    return Progress(writes, 1, phase, 7, 0, NAN, NAN, (), (), None)


def sample(process, writes=9, phase=Phase.DEVICE_WAIT, silence=0.0, limit=10.0, *, is_stopped=False):
    return Sample(process, writes, phase, 7, silence, silence, limit, is_stopped)


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
    samples = [sample(index, -1 if writes is None else writes, is_stopped=index in stopped)
               for index, writes in enumerate(ranks)]  # fmt: skip
    assert [each.process for each in find_suspects(samples)] == suspects


@given(st.data())
def test_whatever_others_do_the_process_that_they_wait_for_is_blamed_once_it_is_over_its_own_time(data):
    """It computes; the others have passed it, some longer ago than others, and are over their own times."""
    behind, count = data.draw(st.integers(0, 7)), data.draw(st.integers(2, 8))
    silence, limit = data.draw(st.floats(11, 100)), data.draw(st.floats(0.1, 200))
    phase = data.draw(st.sampled_from([Phase.START, Phase.OPEN, Phase.COMPILE, Phase.DATA, Phase.SAVE]))
    others = st.builds(sample, st.just(0), st.integers(6, 9), st.sampled_from(WAITING), st.floats(11, 200))
    samples = [sample(behind % count, 5, phase, silence, limit) if process == behind % count
               else data.draw(others)._replace(process=process) for process in range(count)]  # fmt: skip
    found = find_hang(samples)
    if silence <= limit:
        assert found is None
    else:
        assert (found.suspects, found.rank, found.step) == ([behind % count], behind % count, 7)
        assert f"The cause seems to be process {behind % count}." in found.words


def test_a_process_that_others_have_passed_hangs_by_the_timeout_of_its_own_phase(tmp_path):
    """The other evaluates, which may take long, but that is no excuse for one that is not there yet."""
    behind, ahead = progress(15), progress(16, Phase.EVALUATE)
    ranks = [SimpleNamespace(index=0, progress=ahead), SimpleNamespace(index=1, progress=behind)]
    watch = HangWatch(Timeouts(TimeoutPolicy(device_wait=0.1), tmp_path, ""), expects_records=True)
    found, start = None, time.monotonic()
    while found is None and time.monotonic() < start + 30:
        found = find_hang(watch.look(ranks))
        time.sleep(0.01)
    assert (found.rank, found.phase, found.timeout) == (1, Phase.DEVICE_WAIT, 0.1)


def test_processes_that_stall_alike_are_not_told_apart_by_when_they_were_seen(tmp_path):
    ranks = [SimpleNamespace(index=index, progress=progress(9, Phase.DATA)) for index in range(3)]
    watch = HangWatch(Timeouts(TimeoutPolicy(data=0.1), tmp_path, ""), expects_records=True)
    found, start = find_hang(watch.look(ranks[:1])), time.monotonic()
    while found is None and time.monotonic() < start + 30:
        time.sleep(0.03)
        found = find_hang(watch.look(ranks))
    assert found.rank is None
    assert found.words.endswith("The cause seems to be all processes alike.")


@given(st.text(), st.integers(0, 50))
def test_evidence_is_one_printable_line(text, longest):
    line = printable(text, longest)
    assert len(line) <= longest
    assert line.isprintable()
