"""The model of a step's time: work at `Hardware.rates`, or at assumed ones, and collectives at those of `links`."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from zaya_jax.hardware.data_sheets import DATA_SHEET, FIRST_SEEN, Hardware, LinkAssumptions, Rate

_FEW = 1e4  # FLOPs or bytes that make no difference


class Work(NamedTuple):
    """What a device computes at a time: an instruction of a program, or the sum of many."""

    component: str  # of the step's time, such as 'matmuls'
    bytes: float = 0.0  # read and written
    flops: float = 0.0  # floating-point operations
    rate: Literal["matmul", "kernel", "layers"] = "matmul"  # fraction of the peak that is reached, see `Assumptions`
    fp32: bool = False  # whether they are in fp32; fp64 counts as fp32, which is faster
    launches: float = 1  # kernels, of which each takes a fixed time at least
    kernel: str = ""  # name of the kernel, or of a sum that was measured as a whole

    @property
    def name(self) -> str:
        """What measured times are of: the kernel, or the component."""
        return self.kernel or self.component

    def seconds(self, hardware: Hardware) -> float:
        """Return the predicted time: a measured one in proportion, or the operations' or the bytes' at assumed rates.

        A kernel that has changed since it was measured takes the shorter of the two, or the longer if `hardware.slow`.
        """
        reached, (compute, memory) = hardware.reached, self._at_peaks(hardware)
        moves = self.rate == "kernel" and not self.flops
        seconds = max(compute / getattr(reached, self.rate), memory / (reached.moving if moves else reached.memory))
        if rate := self._nearest(hardware):
            peaks = Work("", rate.bytes, rate.flops, fp32=rate.fp32)._at_peaks(hardware)
            # A program of our kernels computes a tile, then writes it, so that neither hides the other; the vendor's
            # and XLA's do both at once.
            together = sum if self.rate == "kernel" else max
            share = together((compute, memory)) / together(peaks)
            if max(peaks) >= reached.launch:
                measured = rate.seconds * share
            else:  # of a launch that waits more than it works: a smaller one waits as long
                measured = rate.seconds if share <= 1 else max(rate.seconds, seconds)
            ends = (measured,) if rate.current else (seconds, measured)
            seconds = max(ends) if hardware.slow else min(ends)
        return max(seconds + self.launches * reached.gap, self.launches * reached.launch)

    def _nearest(self, hardware: Hardware) -> Rate | None:
        """Return the rate whose FLOPs and bytes have the smallest ratios to these, of current ones if there are any."""
        if self.waits(hardware):
            return None
        own = (rate for rate in hardware.rates if (rate.work, rate.fp32) == (self.name, self.fp32))
        return min(own, key=lambda rate: (not rate.current, self._distance(rate)), default=None)

    def within(self, part: str) -> "Work":
        """Return the work as that of a part of the step, if it only moves bytes: what XLA fuses differs by part."""
        return self if self.kernel or self.flops else self._replace(kernel=f"{self.component} in {part}")

    def waits(self, hardware: Hardware) -> bool:
        """Return whether it is XLA's, and so little that it takes what any launch takes."""
        return self.rate != "kernel" and self.roofline(hardware) < 0.1 * hardware.reached.launch

    def _distance(self, rate: Rate) -> float:
        flops = math.log((self.flops + _FEW) / (rate.flops + _FEW))
        return abs(flops) + abs(math.log((self.bytes + _FEW) / (rate.bytes + _FEW)))

    def roofline(self, hardware: Hardware) -> float:
        """Return the seconds that it takes at the data sheet's peaks, without a launch."""
        return max(self._at_peaks(hardware))

    def _at_peaks(self, hardware: Hardware) -> tuple[float, float]:
        return self.flops / (hardware.fp32_peak if self.fp32 else hardware.peak), self.bytes / hardware.bandwidth


def basis(hardware: Hardware, name: str) -> str:
    """Return a sentence on what predicted times of a device of this name are based on."""
    stale = {rate.work for rate in hardware.rates} - {rate.work for rate in hardware.rates if rate.current}
    kernels = f"; of kernels in {hardware.tuned}, measured" if hardware.tuned else ""
    kernels += "; of kernels that have changed since, ranges" if stale else ""
    if hardware.rated:
        return f"Times are predicted from what {hardware.rated}{kernels}."
    if hardware.measured:
        matmul, kernel = (f"{share:.0%}" for share in (hardware.reached.matmul, hardware.reached.kernel))
        return (
            f"Times are predicted from measured speeds: matmuls at {matmul} of the fastest square, kernels at {kernel}."
        )
    return f"Times are ranges, since no {name} was measured: {FIRST_SEEN}{kernels}."


def span(ends: Iterable[float], text: Callable[[float], str]) -> str:
    """Return the text of a range from its two ends; of one value if both read the same."""
    return " to ".join(dict.fromkeys(map(text, ends)))


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
