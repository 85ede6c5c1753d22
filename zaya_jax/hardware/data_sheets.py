"""Accelerator data from the vendors' data sheets, what predictions assume to be reached of them, and measured rates."""

from typing import NamedTuple


class LinkAssumptions(NamedTuple):
    """Fractions of the data sheet's bandwidths that collectives of large messages reach."""

    # of AMD's links between two devices: 48 of 64 GB/s after error correction and protocol (rocm.blogs.amd.com,
    # "Understanding RCCL bandwidth and xGMI performance on MI300X"), of which RCCL uses 93 %
    xgmi: float
    nvlink: float  # 360 of 450 GB/s for all-gathers and reduce-scatters over 8 H100
    adapter: float  # 45 of 50 GB/s


LINKS = LinkAssumptions(xgmi=0.70, nvlink=0.80, adapter=0.90)
DATA_SHEET = LinkAssumptions(1.0, 1.0, 1.0)


class Assumptions(NamedTuple):
    """Fractions of the data sheet's peaks, and fixed times."""

    matmul: float = 0.70  # fraction of the peak in the vendor's matrix products
    kernel: float = 0.50  # the same in our kernels that multiply matrices
    memory: float = 0.90  # fraction of the memory bandwidth
    moving: float = 0.90  # the same in our kernels that multiply no matrices
    layers: float = 0.50  # fraction of the peak in the layers' share of the model's FLOPs, if nothing is compiled
    launch: float = 2e-6  # seconds that a kernel takes at least
    gap: float = 0.0  # seconds between two kernels
    latency: float = 10e-6  # seconds that a collective takes before it sends
    # kernels that a layer launches in both passes, if the program is not compiled: XLA's program of the 8B for an H200
    # has 41 + 76, and 42 + 78 for an MI300X
    layer_launches: int = 120
    # bytes that XLA's program reads and writes outside of matmuls and kernels, relative to the least possible, if it is
    # not compiled: about 2 in programs of the 8B
    traffic: float = 2.0


ASSUMPTIONS = Assumptions()
# A tenth less than the first device reached that was measured, an H200: the slow end of a predicted range. Its vendor's
# products were faster than assumed (docs/accuracy.md).
SLOW = ASSUMPTIONS._replace(kernel=0.30, memory=0.72, moving=0.20, layers=0.24, launch=4.8e-6)
FIRST_SEEN = "the first GPU that was measured took 1.2 to 1.4 times the lower end for a step, up to 18 times for a part"


class Rate(NamedTuple):
    """The time that one launch of some work took on a device."""

    work: str  # `Work.name`
    flops: float  # floating-point operations
    bytes: float  # read and written
    fp32: bool  # whether the operations are in fp32
    seconds: float
    current: bool = True  # False if the kernel has changed since


class Hardware(NamedTuple):
    """One accelerator and its links."""

    kinds: tuple[str, ...]  # substrings of the device names that runtimes report
    memory: float  # bytes, as the runtime reports them
    memory_fraction: float  # part of the memory that XLA may allocate with this accelerator's preset
    peak: float  # dense bf16 FLOP/s
    fp32_peak: float  # dense FLOP/s of fp32 matmuls at jax's default precision: TF32 on NVIDIA, fp32 on AMD
    bandwidth: float  # memory bandwidth, bytes/s
    node_size: int  # devices per node
    intra_node: float  # bytes/s that a device can send to all others of its node together
    link: float  # bytes/s that it can send to one of them; as much as `intra_node` behind a switch
    inter_node: float  # bytes/s that a device's network adapter can send
    units: int  # compute units or streaming multiprocessors
    reached: Assumptions = ASSUMPTIONS  # fractions of the peaks that the dry run's estimate assumes, and fixed times
    links: LinkAssumptions = LINKS  # fractions of the links' bandwidths likewise
    # whether the figures were measured, see `measurements.read_measurements`; False for a data sheet
    measured: bool = False
    rates: tuple[Rate, ...] = ()  # of this kind of device, see `lab.predict.calibration`
    rated: str = ""  # the device of a calibration, and when it was measured; '' if there is none
    tuned: str = ""  # the tables of measured kernels that gave rates; '' if none did
    slow: bool = False  # whether what is not known takes as long as it may, see `slowest`

    @property
    def slowest(self) -> "Hardware":
        """The same device at the slow end of what is not known of it; itself if the speeds were measured."""
        if self.measured:
            return self
        fixed = {"launch": self.reached.launch, "gap": self.reached.gap} if self.rated else {}
        return self._replace(slow=True, reached=SLOW._replace(**fixed))

    @property
    def allocatable(self) -> float:
        """Bytes that XLA may allocate."""
        return self.memory * self.memory_fraction

    @property
    def switched(self) -> bool:
        """True if a switch joins the devices of a node, as NVIDIA's; AMD's have a link to each of the others."""
        return self.link == self.intra_node


# Memory: ROCm reports the 192 GB of a MI300X as 201,310,208 KB (github.com/ROCm/ROCm/issues/4414); those of a MI355X
# count as GiB likewise; CUDA reports 79.1 GiB for an H100 and 139.7 for an H200. Each device has one 400 Gb/s adapter.
# A MI300X has one xGMI link of 64 GB/s to each of the other seven (docs/reference.md §9), a MI355X of 76.8 GB/s; NVLink
# 4 has 450 GB/s per direction, behind NVSwitch. The MI355X has 256 units, each with 4,096 bf16 FLOPs per clock, at
# 2.4 GHz.
HARDWARE = {
    "mi300x": Hardware(("MI300X", "gfx942"), 206.1e9, 0.97, 1307e12, 163.4e12, 5.3e12, 8, 448e9, 64e9, 50e9, 304),
    "mi355x": Hardware(("MI355X", "gfx950"), 309.2e9, 0.97, 2517e12, 157.3e12, 8.0e12, 8, 537.6e9, 76.8e9, 50e9, 256),
    "h100": Hardware(("H100",), 84.9e9, 0.9, 989e12, 494.7e12, 3.35e12, 8, 450e9, 450e9, 50e9, 132),
    "h200": Hardware(("H200",), 150.0e9, 0.9, 989e12, 494.7e12, 4.8e12, 8, 450e9, 450e9, 50e9, 132),
}


def find_hardware(kind: str) -> Hardware | None:
    """Return the data sheet of the device that a runtime calls `kind`; None if there is none."""
    return next((sheet for sheet in HARDWARE.values() if any(part in kind for part in sheet.kinds)), None)


def peak_flops(kind: str) -> float | None:
    """Return the dense bf16 FLOP/s of the device that a runtime calls `kind`; None if it is unknown."""
    sheet = find_hardware(kind)
    return None if sheet is None else sheet.peak


def no_data_sheet(kind: str) -> str:
    """Return why nothing is predicted for a device that is not in `HARDWARE`."""
    return f"There is no data sheet of the device ({kind})."
