"""A network of simulated nodes: a switch in this process, whose wires can be cut, lossy and slow.

Each node is a network namespace; its card is a TAP device, whose frames a thread of this process passes on.
"""

import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Collection

_TUNSETIFF = 0x400454CA
_TAP, _NO_HEADER = 0x0002, 0x1000
_MTU = 16_000  # bytes; few frames, since each costs this process some time
_ALL = -1  # destination of a broadcast


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


class Wires:
    """Passes frames between nodes, which are numbered from 0 in the order of `plug`."""

    def __init__(self, seed: int = 0) -> None:
        self.delay, self.loss = 0.0, 0.0  # seconds, and part of all frames, on the way between two nodes
        self.frames = self.dropped = 0
        self._cut: set[tuple[int, int]] = set()  # from, to
        self._random = random.Random(seed)
        self._cards: list[int] = []  # file descriptors
        self._poll = select.poll()
        self._waiting: list[tuple[float, int, int, bytes]] = []  # due, number, card, frame
        self._numbers = itertools.count()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="wires", daemon=True)
        self._thread.start()

    def plug(self, namespace: str, address: str) -> None:
        """Give the namespace a card `eth0` with this address."""
        card, number = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK), len(self._cards)
        name = f"z{os.getpid() % 100_000}t{number}"
        fcntl.ioctl(card, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _NO_HEADER))
        ip("link", "set", name, "netns", namespace)
        ip("-n", namespace, "link", "set", name, "name", "eth0", "address", f"02:00:00:00:00:{number:02x}",
           "mtu", str(_MTU))  # fmt: skip
        ip("-n", namespace, "addr", "add", address, "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", namespace, "link", "set", device, "up")
        self._cards.append(card)
        self._poll.register(card, select.POLLIN)

    def cut(
        self, some: Collection[int], others: Collection[int], *, sends: bool = False, receives: bool = False
    ) -> None:
        """Cut what `some` nodes send to `others`, unless it `sends`, and what they receive, unless it `receives`."""
        pairs = {(one, other) for one in some for other in others}
        self._cut |= (set() if sends else pairs) | (set() if receives else {(other, one) for one, other in pairs})

    def mend(self) -> None:
        self._cut = set()

    def close(self) -> None:
        self._closed = True
        self._thread.join()
        for card in self._cards:
            os.close(card)

    def _serve(self) -> None:
        while not self._closed:
            due = self._waiting[0][0] - time.monotonic() if self._waiting else 0.1
            for card, _ in self._poll.poll(max(0.0, min(due, 0.1)) * 1000):
                self._read(card)
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                _, _, card, frame = heapq.heappop(self._waiting)
                self._write(card, frame)

    def _read(self, card: int) -> None:
        source = self._cards.index(card)
        for _ in range(64):  # then look at the others, too
            try:
                frame = os.read(card, 65536)
            except OSError:  # nothing more, or its namespace is gone
                return
            target = _ALL if frame[0] & 1 else frame[5]
            for other in range(len(self._cards)):
                if other == source or target not in (_ALL, other) or (source, other) in self._cut:
                    continue
                self.frames += 1
                if self._random.random() < self.loss:
                    self.dropped += 1
                elif self.delay:
                    entry = time.monotonic() + self.delay, next(self._numbers), self._cards[other], frame
                    heapq.heappush(self._waiting, entry)
                else:
                    self._write(self._cards[other], frame)

    def _write(self, card: int, frame: bytes) -> None:
        try:
            os.write(card, frame)
        except OSError:  # its queue is full, as that of a card may be, or its namespace is gone
            self.dropped += 1
