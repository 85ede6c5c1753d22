"""Find what slows a collective by bisection: compare two halves of the devices, and go on with the slower one."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeVar

Device = TypeVar("Device")
Units = list[list[Device]]  # nodes, or single devices of a node
Measure = Callable[[list[Device]], float]
ROUNDS = 5  # in which something must be slow; the fastest counts, since other work on a host passes


def find_slow(nodes: Sequence[Sequence[Device]], measure: Measure[Device], tolerance: float) -> list[Device]:
    """Return the devices that slow a collective down: the smallest group that is slower than another of its size.

    Halves have the same number of `nodes`, or of devices of one node, so that equal links give equal bandwidths, which
    `measure` returns for two devices and more. The slower half is searched if the relative difference exceeds
    `tolerance` in `ROUNDS` measurements. A single node or device is measured together with one that was found good. Two
    or three devices in all, and the network of two or three nodes, cannot be told apart.
    """
    every = [list(node) for node in nodes]
    slow, good = _bisect(every, [], measure, tolerance) if len(every) > 1 else (every, [])
    if len(slow) != 1:
        return list(chain(*slow))
    (node,) = slow
    inside, _ = _bisect([[device] for device in node], [[device] for device in chain(*good)], measure, tolerance)
    return list(chain(*inside)) or (node if len(every) > 1 else [])


def _bisect(
    units: Units[Device], good: Units[Device], measure: Measure[Device], tolerance: float
) -> tuple[Units[Device], Units[Device]]:
    """Return the slow ones of `units`, [] if none is, and some that are good, at first those that are known."""

    def slower(first: Units[Device], second: Units[Device], partner: Units[Device]) -> int | None:
        """Return which of two groups is slower; None if neither is."""
        groups = [[*chain(*(partner[:1] if len(first) == 1 else []), *half)] for half in (first, second)]
        fastest = [0.0, 0.0]
        for _ in range(ROUNDS):
            fastest = [max(speed, measure(group)) for speed, group in zip(fastest, groups, strict=True)]
            if min(fastest) >= (1 - tolerance) * max(fastest):
                return None
        return fastest.index(min(fastest))

    suspects, is_slow = units, False
    while len(suspects) > 1:
        middle = len(suspects) // 2
        halves, last = (suspects[:middle], suspects[middle : 2 * middle]), suspects[2 * middle :]
        if not good and len(list(chain(*halves[0]))) == 1:
            break
        index = slower(*halves, good)
        if index is not None:
            suspects, good, is_slow = halves[index], halves[1 - index], True
        elif last and slower([*last, *halves[0][1:]], halves[0], halves[1]) == 0:
            return last, halves[0]
        else:
            break
    return (suspects if is_slow else []), good
