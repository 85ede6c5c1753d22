"""Network adapters, as Linux shows them in sysfs: links that are down, and links that flap."""

from pathlib import Path

from zaya_jax.aegis.observation import FaultClass, Observation, Severity

_SYS = Path("/sys")
_LONGEST = 64  # bytes of a value
_MOST_PORTS = 256


class NetworkWatch:
    """Compares the state of each port with the last look."""

    def __init__(self, down_seconds: float, root: Path = _SYS) -> None:
        """Remember the ports that are up now; those that are down from the start are not the run's.

        Args:
          down_seconds: how long a link may be down before it counts as lost; the network retries for as long.
          root: folder with `class/`.
        """
        self._root, self._down_seconds = root, down_seconds
        self._up = {port for port, is_up in self._states().items() if is_up}
        self._down: dict[str, float] = {}  # port → when it was first seen down
        self._lost: set[str] = set()

    def poll(self, now: float) -> list[Observation]:
        """Return links that went down, came back, or have been down for too long, each once."""
        seen = []
        states = self._states()
        for port in sorted(self._up):
            is_up = states.get(port, False)
            if is_up and port in self._down:
                seconds = now - self._down.pop(port)
                self._lost.discard(port)
                seen.append(_observe("link-flap", Severity.WARNING, f"{port} was down for {seconds:.1f} s."))
            elif not is_up and port not in self._down:
                self._down[port] = now
                seen.append(_observe("link-down", Severity.WARNING, f"{port} is down."))
            elif not is_up and now - self._down[port] >= self._down_seconds and port not in self._lost:
                self._lost.add(port)
                text = f"{port} has been down for {now - self._down[port]:.0f} s, longer than the network retries."
                seen.append(_observe("link-lost", Severity.ERROR, text))
        return seen

    def _states(self) -> dict[str, bool]:
        """Return for each port of an RDMA adapter, and each physical Ethernet adapter, whether its link is up."""
        states = {}
        for path in sorted(self._root.glob("class/infiniband/*/ports/*/state"))[:_MOST_PORTS]:
            states[f"{path.parts[-4]}/{path.parts[-2]}"] = "ACTIVE" in _read(path)  # such as '4: ACTIVE'
        for path in sorted(self._root.glob("class/net/*/operstate"))[:_MOST_PORTS]:
            if (path.parent / "device").exists():  # virtual ones have none
                states[path.parent.name] = _read(path) == "up"
        return states


def _observe(code: str, severity: Severity, text: str) -> Observation:
    return Observation(code, FaultClass.NETWORK, severity, text)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_LONGEST).decode(errors="replace").strip()
    except OSError:
        return ""
