"""Accelerator data from the vendors' data sheets."""

from typing import NamedTuple

from zaya_jax.errors import InputError


class Hardware(NamedTuple):
    """One accelerator and its links.

    Attributes:
      kinds: substrings of the device names that runtimes report.
      memory: bytes.
      peak: dense bf16 FLOP/s.
      bandwidth: memory bandwidth, bytes/s.
      node_size: devices per node.
      intra_node: bytes/s that a device can send to the others of its node.
      inter_node: bytes/s that a device can send to other nodes.
    """

    kinds: tuple[str, ...]
    memory: float
    peak: float
    bandwidth: float
    node_size: int
    intra_node: float
    inter_node: float


# Inter-node: one 400 Gb/s adapter per device. Intra-node: MI300X has 7 xGMI links of 64 GB/s (docs/reference.md §8),
# MI355X 7 of 76.8 GB/s; NVLink 4 has 450 GB/s per direction.
HARDWARE = {
    "mi300x": Hardware(("MI300X", "gfx942"), 192e9, 1307e12, 5.3e12, 8, 448e9, 50e9),
    "mi355x": Hardware(("MI355X", "gfx950"), 288e9, 2300e12, 8.0e12, 8, 538e9, 50e9),
    "h100": Hardware(("H100",), 80e9, 989e12, 3.35e12, 8, 450e9, 50e9),
    "h200": Hardware(("H200",), 141e9, 989e12, 4.8e12, 8, 450e9, 50e9),
}


def get_hardware(name: str) -> Hardware:
    """Return the data sheet of `name`; `InputError` if it is unknown."""
    if name not in HARDWARE:
        raise InputError(f"--hardware is {name!r}, but must be one of {', '.join(HARDWARE)}.")
    return HARDWARE[name]


def peak_flops(kind: str) -> float | None:
    """Return the dense bf16 FLOP/s of the device that a runtime calls `kind`; None if it is unknown."""
    return next((sheet.peak for sheet in HARDWARE.values() if any(part in kind for part in sheet.kinds)), None)
