"""A conversion that tests start in worker processes; a separate module, so that they import little else."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from zaya_jax.data.prepare.document_encoder import PrepareWork
from zaya_jax.data.prepare.shard_conversion import Record
from zaya_jax.data.prepare.workers import watch
from zaya_jax.data.readers.documents import BadDocument, Entry
from zaya_jax.data.tokenizer import Tokenizer
from zaya_jax.errors import InputError

SIZE = 200_000  # bytes of a unit


class Numbers(NamedTuple):
    """A unit: the numbers from `start` to `stop`, and what happens in the middle the first time."""

    start: int
    stop: int
    event: str = ""


@dataclass(frozen=True)
class Work:
    """Numbers to records: every tenth is held out, every seventh cannot be used; each start is noted in `log`."""

    log: Path
    bad: bool = False
    deadly: tuple[int, ...] = ()  # numbers that end a process, always

    def __call__(self, unit: Numbers) -> Iterator[Record | BadDocument]:
        with self.log.open("a") as file:
            file.write(f"{unit.start} {os.getpid()}\n")
        part = SIZE // (unit.stop - unit.start)
        for number in watch(self.read(unit), lambda number, how: -number):
            if number < 0:
                yield BadDocument("numbers", -number, "ended its process", "twice")
                continue
            if number == (unit.start + unit.stop) // 2:
                self.happen(unit)
            if number in self.deadly:
                end(number)
            if self.bad and number % 7 == 0:
                yield BadDocument("numbers", number, "sevenfold", f"{number} is a multiple")
                continue
            split = "train" if number % 10 else "heldout"
            yield Record(split, str(number).encode(), number, 2 * number, part, "odd" if number % 2 else None)

    def read(self, unit: Numbers) -> Iterator[int]:
        for number in range(unit.start, unit.stop):
            if -number in self.deadly:
                end(number)
            yield number

    def happen(self, unit: Numbers) -> None:
        once = self.log.with_name(f"happened-{unit.start}")
        if unit.event == "raise":
            raise InputError(f"The unit of {unit.start} is bad.")
        if unit.event == "crash":
            raise ZeroDivisionError
        if unit.event == "kill" and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Count:
    """A check that finds two documents of ten bytes in each unit."""

    def __call__(self, unit: Numbers) -> Iterator[int]:
        yield from (10, 10)


@dataclass(frozen=True)
class Deadly(PrepareWork):
    """Encodes documents; those that contain `deadly` end a process while they are encoded."""

    deadly: str = "deadly"

    def _encode(self, tokenizer: Tokenizer, documents: list[Entry]) -> list[Record | BadDocument]:
        if any(self.deadly in getattr(document, "value", "") for document in documents):
            os.abort()
        return super()._encode(tokenizer, documents)


def end(number: int) -> None:
    """End this process in one of the ways in which libraries do."""
    if number % 3 == 0:
        os.abort()
    if number % 3 == 1:
        raise MemoryError
    os._exit(1)
