"""Agreement of all processes of a job on the step after which they stop.

Processes can be a few steps apart, so the one that receives a signal cannot choose the step alone. Any process sends
`stop` to process 0, which asks all for the number of steps they have finished. From its answer on, each waits before
it finishes another one, until process 0 sends the number after the greatest answer.

jax's preemption service does the same, but holds Python's global lock while it waits, and so blocks `relay`, through
which its messages pass.
"""

import threading
from collections.abc import Sequence

from zaya_jax.run.peer import Peer, parse_number

_REQUEST, _QUESTION, _ANSWER, _DECISION = "stop", "finished?", "finished", "stop-after"


class StopStep:
    """One process's part of the agreement; thread-safe. Process 0 has all others as `peers`, these only process 0."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._peers = peers
        self._changed = threading.Condition()
        self._finished = 0  # steps
        self._answers: list[int] = []
        self._deciding = False
        self._stop_after: int | None = None

    def request(self) -> None:
        """Ask for all processes to stop as soon as possible."""
        if self._peers[0].process == 0:
            self._peers[0].send(_REQUEST)
        else:
            self.receive(_REQUEST)

    def reached(self) -> bool:
        """Count a finished step, and return whether to stop after it; waits while the processes agree."""
        with self._changed:
            self._changed.wait_for(lambda: not self._deciding)
            self._finished += 1
            return self._stop_after is not None and self._finished >= self._stop_after

    def receive(self, line: str) -> None:
        """Handle a line from a peer; ignore those that are not of the agreement."""
        kind, _, text = line.partition(" ")
        number = parse_number(text)
        with self._changed:
            if kind == _REQUEST and not self._deciding and self._stop_after is None:
                self._deciding, self._answers = True, [self._finished]
                self._send(_QUESTION)
            elif kind == _QUESTION:
                self._deciding = True
                self._send(f"{_ANSWER} {self._finished}")
            elif kind == _ANSWER and number is not None:
                self._answers.append(number)
                if len(self._answers) > len(self._peers):
                    self._decide(max(self._answers) + 1)
                    self._send(f"{_DECISION} {self._stop_after}")
            elif kind == _DECISION and number is not None:
                self._decide(number)

    def _send(self, line: str) -> None:
        for peer in self._peers:
            peer.send(line)

    def _decide(self, step: int) -> None:
        self._deciding, self._stop_after = False, step
        self._changed.notify_all()
