"""Watch the links of network cards: InfiniBand and RoCE ports and Ethernet interfaces, as the kernel shows them."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from zaya_jax.aegis.failure import FaultClass, Observation, Severity
from zaya_jax.hardware.sysfs import MOST_LINKS, Sysfs

_ERRORS_EVERY = 60.0  # seconds at least between two reports of a link's errors
_ERROR_COUNTERS = ("symbol_error", "local_link_integrity_errors", "port_rcv_errors", "excessive_buffer_overrun_errors")


@dataclasses.dataclass(frozen=True)
class Reading:
    """The state of a link."""

    up: bool | None  # whether it can carry data; None if unknown
    downs: int | None = None  # times that it went down since the driver was loaded; None if unknown
    errors: int = 0  # transmission errors since then


@dataclasses.dataclass
class _Link:
    reading: Reading
    is_watched: bool = False  # it was up: ports without a cable never are
    down_since: float | None = None
    is_lost: bool = False  # reported as such
    flaps: int = 0
    errors_at: float = float("-inf")  # when its errors were last reported
    new_errors: int = 0


class NetworkWatch:
    """Reports links that go down, come back, or stay down."""

    def __init__(self, root: Path = Path("/sys"), down_seconds: float = 30.0) -> None:
        """Watch the links in the sysfs at `root`; one that is down for longer than `down_seconds` counts as lost."""
        self._sysfs, self._down_seconds = Sysfs(root), down_seconds
        self._links: dict[str, _Link] = {}

    def poll(self, now: float) -> list[Observation]:
        """Return what changed; `now` is monotonic, in seconds.

        `link-down` is followed by `link-flap` if the link comes back within `down_seconds`, else by `link-lost`, and by
        `link-up` if it comes back later.
        """
        seen: list[Observation] = []
        try:
            readings = dict(self._read())
        except OSError:
            return seen  # sysfs itself cannot be read, which says nothing about a link
        for name in self._links.keys() - readings.keys():  # the driver or the card is gone
            last = self._links[name].reading
            readings[name] = Reading(False, last.downs, last.errors)
        for name, reading in sorted(readings.items()):
            if name not in self._links and len(self._links) >= MOST_LINKS:
                continue
            link = self._links.setdefault(name, _Link(reading))
            link.is_watched = link.is_watched or reading.up is True
            if link.is_watched:
                seen += self._compare(name, link, reading, now)
            link.reading = reading
        return seen

    def _compare(self, name: str, link: _Link, reading: Reading, now: float) -> Iterator[Observation]:
        old, label = link.reading, f"The link {name}"
        rises = max(0, reading.downs - old.downs) if reading.downs is not None and old.downs is not None else 0
        if link.down_since is None and reading.up is False:
            link.down_since, link.is_lost = now, False
            link.flaps += max(1, rises)
            yield _observe("link-down", Severity.WARNING, f"{label} went down.")
        elif link.down_since is None and rises:
            link.flaps += rises
            often = f"{_times(rises)} between two polls, {_times(link.flaps)} in all"
            yield _observe("link-flap", Severity.INFO, f"{label} went down and came back {often}.")
        elif link.down_since is not None and reading.up:
            down, code = now - link.down_since, "link-up" if link.is_lost else "link-flap"
            link.down_since = None
            link.flaps += rises
            often = f"It went down {_times(link.flaps)} in all."
            yield _observe(code, Severity.INFO, f"{label} came back after {down:.0f} s. {often}")
        down = 0.0 if link.down_since is None else now - link.down_since
        if link.down_since is not None and not link.is_lost and down >= self._down_seconds:
            link.is_lost = True
            allowed = f"at most {self._down_seconds:g} s are allowed"
            yield _observe("link-lost", Severity.ERROR, f"{label} has been down for {down:.0f} s; {allowed}.")
        link.new_errors += max(0, reading.errors - old.errors)
        if link.new_errors and now - link.errors_at >= _ERRORS_EVERY:
            yield _observe("link-errors", Severity.WARNING, f"{label} had {link.new_errors} new transmission errors.")
            link.errors_at, link.new_errors = now, 0

    def _read(self) -> Iterator[tuple[str, Reading]]:
        text, count = self._sysfs.text, self._sysfs.count
        for name, folder in self._sysfs.ports():
            errors = sum(count(f"{folder}/counters/{counter}") or 0 for counter in _ERROR_COUNTERS)
            state, physical = text(f"{folder}/state"), text(f"{folder}/phys_state")  # such as '4: ACTIVE'
            up = state.startswith("4:") and (not physical or physical.startswith("5:")) if state else None
            yield name, Reading(up, count(f"{folder}/counters/link_downed"), errors)
        for name, folder in self._sysfs.interfaces(physical=True):
            changes, downs = count(f"{folder}/carrier_changes"), count(f"{folder}/carrier_down_count")
            if downs is None and changes is not None:  # a change per time up and per time down, first up
                downs = changes // 2
            up = {"up": True, "down": False, "lowerlayerdown": False, "notpresent": False}
            yield name, Reading(up.get(text(f"{folder}/operstate")), downs)


def _observe(code: str, severity: Severity, text: str) -> Observation:
    return Observation(code, FaultClass.NETWORK, severity, text)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
