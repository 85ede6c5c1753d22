"""Find what slows a collective by bisection: compare two halves of the devices, and go on with the slower one."""

from collections.abc import Callable, Sequence
from typing import TypeVar

Device = TypeVar("Device")
ROUNDS = 5  # in which something must be slow; the fastest counts, since other work on a host passes


def find_slow(
    devices: Sequence[Device], measure: Callable[[Sequence[Device]], float], tolerance: float
) -> list[Device]:  # fmt: skip
    """Return the devices that slow a collective down.

    Halves of one device are measured together with a device that was found good.

    Args:
      devices: neighbours next to each other, so that halves are whole nodes where possible.
      measure: devices → bus bandwidth, which is the same for groups of different sizes if all links are alike.
      tolerance: relative difference of two halves, in `ROUNDS` measurements, from which on the slower one is searched.

    Returns:
      The smallest group that is slower than its other half; [] if no half is. Two devices without a third to compare
      with are not told apart.
    """
    suspects, good, is_slow = list(devices), list[Device](), False
    while len(suspects) > 1:
        middle = len(suspects) // 2
        halves = [suspects[:middle], suspects[middle:]]
        partners = good[:1] if middle == 1 else []
        if middle == 1 and not good:
            break
        fastest = [0.0, 0.0]
        for _ in range(ROUNDS):
            fastest = [max(speed, measure([*partners, *half])) for speed, half in zip(fastest, halves, strict=True)]
            if min(fastest) >= (1 - tolerance) * max(fastest):
                return suspects if is_slow else []
        slower = fastest.index(min(fastest))
        suspects, is_slow = halves[slower], True
        good = halves[1 - slower]
    return suspects if is_slow else []
