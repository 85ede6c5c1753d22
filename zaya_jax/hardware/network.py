"""The time of a collective over xGMI or NVLink within nodes, and one network adapter per device between them."""

from collections import Counter
from collections.abc import Sequence

from zaya_jax.hardware.assumptions import DATA_SHEET, LinkAssumptions
from zaya_jax.hardware.data_sheets import Hardware

_EXCHANGE = ("all-to-all", "ragged-all-to-all")


def collective_seconds(
    kind: str, sent: float, devices: Sequence[int], hardware: Hardware, achieved: LinkAssumptions = DATA_SHEET
) -> float:
    """Return the time of a collective without latency.

    Rings over whole nodes use every adapter: each device sends its share of what the node must send. Within a node a
    device uses its links to the devices that take part, so on AMD two of them have one link. Transfers within and
    between nodes run at the same time, so the slower one counts.

    Args:
      kind: of the collective, as in HLO; another than the known ones counts as a ring.
      sent: bytes that each device sends; with n devices (n − 1) / n of the whole for `all-gather`, `reduce-scatter` and
        `all-to-all`, and twice that for `all-reduce`.
      devices: numbers of the devices of one group; neighbours share a node.
      hardware: data sheet.
      achieved: fractions of its bandwidths.

    Returns:
      Seconds.
    """
    n = len(devices)
    members = Counter(device // hardware.node_size for device in devices)
    nodes, inside = len(members), max(members.values(), default=1)
    if n < 2 or sent == 0:
        return 0.0
    fraction = achieved.nvlink if hardware.link == hardware.intra_node else achieved.xgmi
    adapter = hardware.inter_node * achieved.adapter
    if kind == "collective-permute":
        return sent / (adapter if nodes > 1 else hardware.link * fraction)
    intra = min(hardware.intra_node, (inside - 1) * hardware.link) * fraction
    if kind in _EXCHANGE:
        between, within = sent * (n - inside) / (n - 1), sent * (inside - 1) / (n - 1)
    else:
        whole = sent * n / (n - 1)
        between, within = whole * (nodes - 1) / nodes / inside, sent
    return max(between / adapter, within / intra if inside > 1 else 0.0)
