"""Every fraction of a data sheet, and every fixed time, that predictions of a step assume. None is measured here."""

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
    launch: float = 2e-6  # seconds that a kernel takes at least
    latency: float = 10e-6  # seconds that a collective takes before it sends
    # kernels that a layer launches in both passes, if the program is not compiled: XLA's program of the 8B for an H200
    # has 41 + 76, and 42 + 78 for an MI300X
    layer_launches: int = 120
    # bytes that XLA's program reads and writes outside of matmuls and kernels, relative to the least possible, if it is
    # not compiled: about 2 in programs of the 8B
    traffic: float = 2.0


ASSUMPTIONS = Assumptions()
