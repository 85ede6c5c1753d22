"""All processes of a job stop after the same step, whoever asks and however far apart they are."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given, settings
from hypothesis import strategies as st

from zaya_jax.job.stop_step import StopStep
from zaya_jax.run.peer import Peer

STEPS = 40


def star(processes):
    """The connections of each process: of process 0 to all others, of the others to process 0."""
    pairs = [socket.socketpair() for _ in range(processes - 1)]
    yield [Peer(ours, number + 1) for number, (ours, _) in enumerate(pairs)]
    for _, theirs in pairs:
        yield [Peer(theirs, 0)]


def deliver(stop_step, peers, ended):
    while not ended.is_set():
        for peer in peers:
            for line in peer.receive() or ():
                stop_step.receive(line)
        time.sleep(0.0005)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_all_stop_after_one_step_which_comes_after_the_request(data):
    processes = data.draw(st.integers(2, 5))
    asked = data.draw(st.dictionaries(st.integers(0, processes - 1), st.integers(1, STEPS // 2), min_size=1))
    pauses = data.draw(st.lists(st.integers(0, 3), min_size=processes, max_size=processes))  # milliseconds
    peers = list(star(processes))
    agreements = [StopStep(some) for some in peers]
    ended = threading.Event()

    def train(process):
        for step in range(1, STEPS):
            time.sleep(pauses[process] / 1000)
            if asked.get(process) == step:
                agreements[process].request()
            if agreements[process].reached():
                assert agreements[process].reached()  # and remembers it
                return step
        return None

    with ThreadPoolExecutor(2 * processes) as pool:
        for some, agreement in zip(peers, agreements, strict=True):
            pool.submit(deliver, agreement, some, ended)
        try:
            stopped = list(pool.map(train, range(processes)))
        finally:
            ended.set()
    for some in peers:
        for peer in some:
            peer.close()
    # Faster processes may have finished all steps before a slow one asks: then nobody stops in time.
    assert len(set(stopped)) == 1, stopped
    assert stopped[0] is None or stopped[0] >= min(asked.values())


def test_a_request_stops_processes_that_keep_pace():
    """Each waits for the others after a step, as collectives make them; the one that asks is not process 0."""
    peers = list(star(3))
    agreements = [StopStep(some) for some in peers]
    ended, barrier, stopped = threading.Event(), threading.Barrier(3), []

    def train(process):
        for step in range(1, 2000):
            barrier.wait(10)
            if (process, step) == (1, 5):
                agreements[process].request()
            if agreements[process].reached():
                return stopped.append(step)
        return None

    with ThreadPoolExecutor(6) as pool:
        for some, agreement in zip(peers, agreements, strict=True):
            pool.submit(deliver, agreement, some, ended)
        list(pool.map(train, range(3)))
        ended.set()
    for peer in (peer for some in peers for peer in some):
        peer.close()
    assert len(stopped) == 3
    assert len(set(stopped)) == 1
    assert stopped[0] > 5


def test_none_stops_unasked_or_because_of_another_line():
    (first,), (second,) = star(2)
    agreement = StopStep([first])
    for line in ("", "done", "welcome"):
        agreement.receive(line)
    assert not any(agreement.reached() for _ in range(STEPS))
    first.close()
    second.close()
