"""Detect lost processes of a job, so that the others end with a message that names the lost one.

Process 0 has a connection to every other process. The operating system closes the connections of a process that ends,
which reports its loss at once; heartbeats detect a process that hangs, or whose machine or link is down. A process that
must end sends its message, process 0 forwards it, and all processes end with it. jax also has heartbeats, but they
end a process with a C++ stack trace, so their timeout is longer.
"""

import atexit
import selectors
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

from zaya_jax.job.stop_step import StopStep
from zaya_jax.run.peer import EXIT, Peer, end_connections, parse_exit
from zaya_jax.run.progress_record import ProgressRecord
from zaya_jax.run.signals import exit_at_once, print_error

_DONE = "done"
_BEAT = 5.0  # seconds at most between two heartbeats
_EXIT_SECONDS = 2.0  # that the others have at most to read the message with which this process exits
_AGAIN = "Start all processes again with the same command, to resume from the newest checkpoint, if there is one."


class PeerLiveness:
    """A thread that sends heartbeats, and ends the process when a peer is silent for `peer_timeout` seconds."""

    def __init__(self, peers: Sequence[Peer], peer_timeout: float, progress: ProgressRecord | None = None) -> None:
        """Start the thread; `progress` receives the exit record."""
        self._peers, self._timeout, self._progress = list(peers), peer_timeout, progress or ProgressRecord()
        self.stop_step = StopStep(self._peers)  # its messages arrive in the thread
        self._last_seen = dict.fromkeys(peers, time.monotonic())
        self._done: set[Peer] = set()
        self._exiting = threading.Lock()
        threading.Thread(target=self._listen, name="peer-liveness", daemon=True).start()
        atexit.register(self._send_done)  # before jax's own, which was registered earlier and waits for the others

    def leave(self, sentence: str, status: int) -> NoReturn:
        """Print and send a message, and exit at once: a normal exit waits for processes that may be lost or busy."""
        self._exiting.acquire()  # never released: only the first message is sent
        self._progress.end(status, sentence, is_origin=False)  # ignored if this process has left its own
        print_error(sentence)
        end_connections(self._peers, min(self._timeout, _EXIT_SECONDS), f"{EXIT}{status} {sentence}")
        exit_at_once(status)

    def wait(self) -> None:
        """Wait for the thread to end this process, after a collective failed before the lost process is known."""
        time.sleep(self._timeout + _BEAT)

    def _send_done(self) -> None:
        for peer in self._peers:
            peer.send(_DONE)

    def _listen(self) -> None:
        pause, next_beat = min(self._timeout / 10, _BEAT), 0.0
        live = list(self._peers)
        with selectors.DefaultSelector() as selector:
            for peer in live:
                selector.register(peer, selectors.EVENT_READ)
            while True:
                readable = [key.fileobj for key, _ in selector.select(pause)]
                closed = [peer for peer in live if peer in readable and not self._receive(peer)]
                for peer in closed:
                    selector.unregister(peer)
                    live.remove(peer)
                now = time.monotonic()
                if now >= next_beat:
                    next_beat = now + pause
                    for peer in live:
                        peer.send("")
                self._end_if([peer for peer in closed if peer not in self._done], "was lost: its connection closed")
                silent = [peer for peer in live if now - self._last_seen[peer] > self._timeout]
                self._end_if(silent, f"sent no heartbeat for {self._timeout:g} s")

    def _receive(self, peer: Peer) -> bool:
        """Read what a peer sent; returns whether the connection is still open."""
        lines = peer.receive()
        if lines:
            self._last_seen[peer] = time.monotonic()
        for line in lines or ():
            if line == _DONE:
                self._done.add(peer)
            elif line.startswith(EXIT):
                status, sentence = parse_exit(line)
                self.leave(sentence, status)
            else:
                self.stop_step.receive(line)
        return lines is not None

    def _end_if(self, lost: Sequence[Peer], event: str) -> None:
        if lost:
            sentences = " ".join(f"Process {peer} {event}." for peer in lost)
            self.leave(f"Stopped: {sentences} {_AGAIN}", 1)
