"""Damage as disks do it, to the newest of two checkpoints, and what restoring makes of it."""

import random
import shutil
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from tests.checkpoint.test_store import make_state, newest, save_all
from tests.train_helpers import differing

KINDS = ("flip", "truncate", "zero page", "delete", "swap")
WHERE = ("data", "metadata")
WIDTH = 3000  # so that arrays are files of several pages, beside those small enough to lie in Orbax's metadata
PAGE = 4096


class Damage(NamedTuple):
    """What was done to which file."""

    kind: str
    place: str
    file: str
    detail: str


def save_two(folder: Path) -> dict[int, Any]:
    """Checkpoints 1 and 2 of the same shapes in `folder`; their states by step."""
    states = {step: make_state(step, WIDTH) for step in (1, 2)}
    save_all(folder, states, width=WIDTH)
    return states


def unread(folder: Path, states: dict[int, Any]) -> set[str]:
    """The files of checkpoint 2 in `folder` that restoring does not read: with every bit turned, none is missed.

    Orbax leaves the indices of single processes, from which it made that of all.
    """
    unread_files = set()
    for file in sorted((folder / "2").rglob("*")):
        if not file.is_file():
            continue
        run, name = folder.with_name("inverted"), file.relative_to(folder).as_posix()
        shutil.copytree(folder, run)
        (run / name).write_bytes(bytes(255 - byte for byte in file.read_bytes()))
        if _ending(run, Damage("inverted", "", name, ""), states) == "harmless":
            unread_files.add(name)
        shutil.rmtree(run)
    return unread_files


def damage(folder: Path, rng: random.Random, kind: str, place: str, spared: Collection[str] = ()) -> Damage:
    """Do it to a file of checkpoint 2 in `folder` that is not `spared`, or to what is said of the checkpoints there."""
    files = [path for path in sorted((folder / "2").rglob("*")) if path.is_file()]
    files = [path for path in files if ("d" in path.parts) == (place == "data")]
    files = [path for path in files if path.relative_to(folder).as_posix() not in spared]
    if place == "metadata":
        files.append(folder / "GENERATION")
    if kind in ("flip", "truncate", "zero page"):
        files = [path for path in files if path.stat().st_size]
    if kind == "zero page":
        files = [path for path in files if any(path.read_bytes())]
    path, before = rng.choice(files), _contents(folder)
    done = Damage(kind, place, path.relative_to(folder).as_posix(), _DO[kind](path, files, rng))
    assert _contents(folder) != before, f"{done} changed nothing"
    return done


def _contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _flip(path: Path, _: list[Path], rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    at, bit = rng.randrange(len(content)), rng.randrange(8)
    content[at] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {at}"


def _truncate(path: Path, _: list[Path], rng: random.Random) -> str:
    size = rng.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.truncate(size)
    return f"to {size} bytes"


def _zero_page(path: Path, _: list[Path], rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    start = rng.choice([at for at in range(0, len(content), PAGE) if any(content[at : at + PAGE])])
    content[start : start + PAGE] = bytes(len(content[start : start + PAGE]))
    path.write_bytes(content)
    return f"at byte {start}"


def _delete(path: Path, _: list[Path], __: random.Random) -> str:
    path.unlink()
    return ""


def _swap(path: Path, files: list[Path], rng: random.Random) -> str:
    """With another file of the checkpoint, or for one that lies there in the older checkpoint; never for its equal."""
    content = path.read_bytes()
    older = [file for file in sorted(_in_older(path.parent).glob("*")) if file.is_file() and file != path]
    older = [file for file in older if file.read_bytes() != content]
    if older and rng.random() < 0.5:
        source = rng.choice(older)
        shutil.copy(source, path)
        return f"for {source.name} of checkpoint 1"
    other = rng.choice([file for file in files if file.read_bytes() != content])
    spare = path.with_name("spare")
    path.rename(spare)
    other.rename(path)
    spare.rename(other)
    return f"with {other.name}"


def _in_older(folder: Path) -> Path:
    return Path(*("1" if part == "2" else part for part in folder.parts))


_DO = {"flip": _flip, "truncate": _truncate, "zero page": _zero_page, "delete": _delete, "swap": _swap}


def count(folder: Path, number: int, seed: int, all_files: bool) -> dict[str, Counter[str]]:
    """Damage copies of two checkpoints `number` times, restore from each, and count how it ended, by kind and place.

    Damaged are all files, or those that restoring reads.

    'found' is damage that was told, for which the older checkpoint was taken, 'harmless' such that left every value as
    it was saved; 'silent' would be anything else that restored.
    """
    states = save_two(folder / "whole")
    spared = set() if all_files else unread(folder / "whole", states)
    rng = random.Random(seed)
    counts: dict[str, Counter[str]] = {}
    for index in range(number):
        run = folder / "run"
        shutil.copytree(folder / "whole", run)
        kind, place = KINDS[index % len(KINDS)], WHERE[index // len(KINDS) % len(WHERE)]
        done = damage(run, rng, kind, place, spared)
        try:
            ending = _ending(run, done, states)
            # Which process may write, as GENERATION says, does not matter to values.
            assert all_files or ending != "harmless" or done.file == "GENERATION"
        except Exception as error:
            error.add_note(f"{done} (damage {index}, seed {seed})")
            raise
        counts.setdefault(f"{kind}, {place}", Counter())[ending] += 1
        shutil.rmtree(run)
    return counts


def _ending(run: Path, done: Damage, states: dict[int, Any]) -> str:
    messages: list[str] = []
    step, state = newest(run, messages, WIDTH)
    if differing(state, states[step]):
        return "silent"
    assert (step == 1) == any("It was quarantined as 2.corrupt-" in sentence for sentence in messages), (done, messages)
    assert (run / "2").exists() == (step == 2), done
    return "harmless" if step == 2 else "found"
