"""The model of a step's time: work and collectives at the rates that `Hardware.reached` and `links` assume."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from zaya_jax.hardware.data_sheets import DATA_SHEET, Hardware, LinkAssumptions


class Work(NamedTuple):
    """What a device computes at a time: an instruction of a program, or the sum of many."""

    component: str  # of the step's time, such as 'matmuls'
    bytes: float = 0.0  # read and written
    flops: float = 0.0  # floating-point operations
    rate: Literal["matmul", "kernel"] = "matmul"  # fraction of the peak that the operations reach, see `Assumptions`
    fp32: bool = False  # whether they are in fp32; fp64 counts as fp32, which is faster
    launches: float = 1  # kernels, of which each takes a fixed time at least

    def seconds(self, hardware: Hardware) -> float:
        """Return the predicted time: that of the operations, the bytes or the launches, whichever is longest."""
        reached, (compute, memory) = hardware.reached, self._at_peaks(hardware)
        fraction = reached.kernel if self.rate == "kernel" else reached.matmul
        return max(compute / fraction, memory / reached.memory, self.launches * reached.launch)

    def roofline(self, hardware: Hardware) -> float:
        """Return the seconds that it takes at the data sheet's peaks, without a launch."""
        return max(self._at_peaks(hardware))

    def _at_peaks(self, hardware: Hardware) -> tuple[float, float]:
        return self.flops / (hardware.fp32_peak if self.fp32 else hardware.peak), self.bytes / hardware.bandwidth


class Timeline:
    """Seconds until a device, and its network, are free: collectives run in turn, beside the device's work."""

    def __init__(self) -> None:
        self.now = self.network = 0.0

    def run(self, work: Iterable[Work], hardware: Hardware) -> dict[str, float]:
        """Run work on the device, and return its seconds by component."""
        components = defaultdict[str, float](float)
        for one in work:
            components[one.component] += one.seconds(hardware)
        self.now += sum(components.values())
        return dict(components)

    def start(self, seconds: float) -> float:
        """Start a collective as soon as the network is free, and return when it ends."""
        self.network = max(self.now, self.network) + seconds
        return self.network

    def wait(self, end: float) -> float:
        """Let the device wait for a collective that ends at `end`, and return the seconds that it waits."""
        exposed = max(0.0, end - self.now)
        self.now += exposed
        return exposed


def collective_seconds(
    kind: str, sent: float, devices: Sequence[int], hardware: Hardware, achieved: LinkAssumptions = DATA_SHEET
) -> float:
    """Return the time of a collective without latency, over xGMI or NVLink within nodes and one adapter per device.

    Rings over whole nodes use every adapter: each device sends its share of what the node must send. Within a node a
    device uses its links to the others, so on AMD two of them have one link. The slower of transfers within and between
    nodes counts. Unknown kinds count as rings. Each device sends `sent` bytes: with n devices (n − 1) / n of the whole
    for `all-gather`, `reduce-scatter` and `all-to-all`, twice that for `all-reduce`. `devices` are one group's numbers,
    neighbours in a node; `achieved` are fractions of the bandwidths.
    """
    n = len(devices)
    members = Counter(device // hardware.node_size for device in devices)
    nodes, inside = len(members), max(members.values(), default=1)
    if n < 2 or sent == 0:
        return 0.0
    fraction = achieved.nvlink if hardware.switched else achieved.xgmi
    adapter = hardware.inter_node * achieved.adapter
    if kind == "collective-permute":
        return sent / (adapter if nodes > 1 else hardware.link * fraction)
    intra = min(hardware.intra_node, (inside - 1) * hardware.link) * fraction
    if kind in ("all-to-all", "ragged-all-to-all"):
        between, within = sent * (n - inside) / (n - 1), sent * (inside - 1) / (n - 1)
    else:
        between, within = sent * n / (n - 1) * (nodes - 1) / nodes / inside, sent
    return max(between / adapter, within / intra if inside > 1 else 0.0)
