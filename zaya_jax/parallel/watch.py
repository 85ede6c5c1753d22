"""Processes of a job listen to each other, so that a run that has lost one ends with a sentence.

Each writes a count into the coordinator's store again and again, and notes when it last could; process 0, which the
store belongs to, notes when each other's count last changed. One that has to end writes its sentence there instead,
process 0 repeats it, and all end with it. jax's own heartbeats end a process too, without a word of ours: they are
given more time.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
from typing import Any, NoReturn

_KEYS = "zaya_jax/beat/"
_DONE = "done"
_ENDS = "!"  # begins what is said by one that has to end: then its exit status, and why
_BEAT = 5.0  # seconds at most between two beats


class Watch:
    """Two threads: one that beats, one that ends the process when another has been silent for too long."""

    def __init__(self, client: Any, process: int, processes: int, silence: float) -> None:
        """Begin.

        Args:
          client: of the coordinator's store (`key_value_set`, `key_value_try_get`, `key_value_dir_get`).
          process: this one's number.
          processes: of the job.
          silence: seconds that another process may go unheard.
        """
        self._client, self._process, self._silence = client, process, silence
        self._others = list(range(1, processes)) if process == 0 else [0]
        self._heard = dict.fromkeys(self._others, time.monotonic())
        self._said: dict[int, str] = {}
        self._ended = threading.Event()
        self._last_word = threading.Lock()
        for target in (self._beat, self._judge):
            threading.Thread(target=target, name="watch", daemon=True).start()
        atexit.register(self._farewell)  # before jax's own, which was registered earlier

    def leave(self, sentence: str, status: int) -> NoReturn:
        """Say why, to a person and to the other processes, and end this one at once.

        An orderly end would wait for others that are lost, or busy. Process 0 gives them time to hear it.
        """
        self._last_word.acquire()  # for good: whoever comes later has nothing to add
        self._ended.set()
        print(sentence, file=sys.stderr, flush=True)
        tell = threading.Thread(target=self._tell, args=[f"{_ENDS}{status} {sentence}"], daemon=True)
        tell.start()
        tell.join(min(self._silence, 4 * self._pause + 1))  # over a link that is cut it would take forever
        end(None, status)

    def _tell(self, last: str) -> None:
        with contextlib.suppress(Exception):
            self._say(last)
            while self._process == 0 and not all(map(self._over, self._others)):
                time.sleep(0.1)
                self._said |= self._listen()

    def _over(self, other: int) -> bool:
        return self._said.get(other, "").startswith((_DONE, _ENDS))

    def _farewell(self) -> None:
        self._ended.set()
        with contextlib.suppress(Exception):  # there may be nobody to say it to
            self._say(_DONE)

    @property
    def _pause(self) -> float:
        return min(self._silence / 10, _BEAT)

    def _say(self, text: str) -> None:
        self._client.key_value_set(f"{_KEYS}{self._process}", text, allow_overwrite=True)

    def _listen(self) -> dict[int, str]:
        """What others have last said: all of them to process 0, which is the one that the rest listen to."""
        if self._process:
            return {0: self._client.key_value_try_get(f"{_KEYS}0")}
        found = {int(key.rpartition("/")[2]): text for key, text in self._client.key_value_dir_get(_KEYS)}
        return {other: text for other, text in found.items() if other != 0}

    def _beat(self) -> None:
        count = 0
        while not self._ended.wait(self._pause):
            count += 1
            said: dict[int, str] = {}
            with contextlib.suppress(Exception):  # not heard is what the other thread counts
                self._say(str(count))
                said = self._listen()
            for other, text in said.items():
                # Process 0's store answers: that is enough to know that it is there.
                if self._process or text != self._said.get(other):
                    self._heard[other] = time.monotonic()
                self._said[other] = text
                if text.startswith(_ENDS) and not self._ended.is_set():
                    status, _, sentence = text.removeprefix(_ENDS).partition(" ")
                    self.leave(sentence, int(status))

    def _judge(self) -> None:
        while not self._ended.wait(self._silence / 20):
            now = time.monotonic()
            silent = [one for one, at in self._heard.items() if now - at > self._silence and not self._over(one)]
            if silent and not self._ended.is_set():
                self.leave(f"Stopped: Process {', '.join(map(str, silent))} was not heard for {self._silence:g} s. "
                           "The same command goes on from the last checkpoint.", 1)  # fmt: skip


def end(sentence: str | None, status: int) -> NoReturn:
    """End this process at once, with a last sentence where one is given."""
    if sentence is not None:
        print(sentence, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(status)
