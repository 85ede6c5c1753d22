"""Accelerators by their vendors' data sheets."""

from typing import NamedTuple

from zaya_jax.errors import InputError


class Hardware(NamedTuple):
    """One accelerator, and its links to others.

    Attributes:
      kinds: parts of the names that runtimes give the device.
      memory: bytes.
      peak: dense bf16 FLOP/s.
      bandwidth: of the memory, bytes/s.
      node_size: devices of a node.
      intra_node: bytes/s that a device sends to the others of its node.
      inter_node: bytes/s that a device sends to other nodes.
    """

    kinds: tuple[str, ...]
    memory: float
    peak: float
    bandwidth: float
    node_size: int
    intra_node: float
    inter_node: float


# Between nodes: a 400 Gb/s adapter a device. Inside: MI300X 7 xGMI links of 64 GB/s (zaya1.md §8), MI355X 7 of 76.8;
# NVLink 4 has 450 GB/s in each direction.
HARDWARE = {
    "mi300x": Hardware(("MI300X", "gfx942"), 192e9, 1307e12, 5.3e12, 8, 448e9, 50e9),
    "mi355x": Hardware(("MI355X", "gfx950"), 288e9, 2300e12, 8.0e12, 8, 538e9, 50e9),
    "h100": Hardware(("H100",), 80e9, 989e12, 3.35e12, 8, 450e9, 50e9),
    "h200": Hardware(("H200",), 141e9, 989e12, 4.8e12, 8, 450e9, 50e9),
}


def get_hardware(name: str) -> Hardware:
    """The data sheet of `name`; `InputError` if there is none."""
    if name not in HARDWARE:
        raise InputError(f"--hardware is {name!r}, but must be one of {', '.join(HARDWARE)}.")
    return HARDWARE[name]


def peak_flops(kind: str) -> float | None:
    """Dense bf16 FLOP/s of the device that a runtime calls `kind`; None if its data sheet is not here."""
    return next((sheet.peak for sheet in HARDWARE.values() if any(part in kind for part in sheet.kinds)), None)
