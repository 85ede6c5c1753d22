"""The rules, each a function of a phase's sizes (docs/reference.md §9 and §10, and the papers that they name)."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from zaya_jax.config import ModelConfig
from zaya_jax.hardware.data_sheets import Hardware
from zaya_jax.model.experts import rows_per_token

Status = Literal["PASS", "WARN", "FAIL", "OPEN"]

TILE = 128  # rows and columns of a product's tile
SATURATING_FLOPS = 200e9  # of a product that reaches the peak of a MI300X
WEAK_DEPTH = 1024  # contracted sizes up to this one are slow and uneven on a MI300X
_INSTRUCTION = 32  # contracted elements that every bf16 matrix instruction divides
_MFMA = "AMD, CDNA 3 instruction set, V_MFMA"
_ANTHONY = "Anthony et al., arXiv 2401.14489"
_ZAYA = "arXiv 2511.17127, §III"


class Product(NamedTuple):
    """A matrix product of the forward pass, for a micro-batch on one device."""

    name: str  # what it computes
    times: int  # how often the model runs it: once in each layer, or once
    groups: int  # number of products of this size, which run as one grouped product
    rows: int  # tokens of each
    columns: int  # width of the output
    depth: int  # contracted size

    @property
    def flops(self) -> float:
        """FLOPs of all groups, once."""
        return 2.0 * self.groups * self.rows * self.columns * self.depth


class Measured(NamedTuple):
    """What was measured on the hardware; each is None if it was not."""

    knee: float | None = None  # bytes that saturate the network, by `machine collectives`
    # speed of the experts' products with evenly spread tokens, over that of the fastest square, by `machine gemm`
    experts: float | None = None
    # speed of products that contract the hidden size, over the median of their neighbours', by the same
    stride: float | None = None


class Sizes(NamedTuple):
    """The sizes of a phase."""

    model: ModelConfig  # the architecture
    tokens: int  # tokens of a micro-batch on one device
    axes: Mapping[str, int]  # devices along each mesh axis
    in_node: Mapping[str, int]  # by axis with more than one device, the devices of a group that share a node
    hardware: Hardware  # data sheet
    # whether twice the micro-batch fits, by the dry run's estimate; None if the batch has no more
    fits_twice: bool | None
    fits_unsharded: bool | None  # whether the phase fits with `fsdp: 1`, by the same estimate; None if it has no FSDP
    message: int  # bytes of the smallest large all-gather of parameters; 0 if none
    measured: Measured  # on this hardware


class Finding(NamedTuple):
    """What a rule says of a phase."""

    rule: str  # its name
    status: Status  # 'OPEN' if it needs a measurement that is missing
    value: str  # what it looked at
    loss: float | None  # predicted share of the time that is lost; None if it cannot be told
    advice: str  # what to change; '' if it passes
    reason: str  # why the rule holds
    source: str  # where it comes from


def products(model: ModelConfig, tokens: int, experts: int = 1) -> list[Product]:
    """Return the matrix products of the layers, and the head.

    Args:
      model: the architecture.
      tokens: tokens of a micro-batch on one device.
      experts: devices that share the experts; tokens are taken to be routed evenly.
    """
    d, f, heads = model.hidden_size, model.expert_size, model.num_query_heads + model.num_kv_heads
    groups, layers = model.num_experts // experts, model.num_layers
    routed = tokens * experts * rows_per_token(model) // model.num_experts
    convolution = Product("convolution", layers, heads, tokens, model.head_dim, model.head_dim)
    return [
        Product("attention projections", layers, 1, tokens, model.query_size + 2 * model.kv_size, d),
        *([convolution] if model.has_convolutions else []),
        Product("attention output", layers, 1, tokens, d, model.query_size),
        Product("experts, gate and up", layers, groups, routed, 2 * f, d),
        Product("experts, down", layers, groups, routed, d, f),
        Product("head", 1, 1, tokens, model.vocab_size, d),
    ]


def _multiple(value: int, good: int, fair: int) -> Status:
    return "PASS" if value % good == 0 else "WARN" if value % fair == 0 else "FAIL"


def vocabulary(sizes: Sizes) -> Finding:
    """The vocabulary is a multiple of 64."""
    v = sizes.model.vocab_size
    return Finding("vocabulary", _multiple(v, 64, 64), f"{v:,}", None,
                   "" if v % 64 == 0 else f"pad model.vocab_size to {-(-v // 64) * 64}",
                   "The head's product needs whole tiles of columns.", _ANTHONY)  # fmt: skip


def head_dim(sizes: Sizes) -> Finding:
    """The width of a head is a multiple of 128, or at least of 64."""
    c = sizes.model.head_dim
    return Finding("head width", _multiple(c, 128, 64), str(c), None, "" if c % 128 == 0 else "model.head_dim=128",
                   "Few wide heads fill the matrix units better than many small ones.", _ANTHONY)  # fmt: skip


def latent_widths(sizes: Sizes) -> Finding:
    """The widths of compressed queries and keys are multiples of 64."""
    widths = (sizes.model.query_size, sizes.model.kv_size)
    status = "PASS" if all(width % 64 == 0 for width in widths) else "FAIL"
    return Finding("latent widths", status, " and ".join(map(str, widths)), None,
                   "" if status == "PASS" else "choose heads × head_dim as multiples of 64",
                   "Compressed attention has narrow products, which lose most by partial tiles.", _ANTHONY)  # fmt: skip


def expert_width(sizes: Sizes) -> Finding:
    """The hidden width of an expert is a multiple of 256, or at least of 64."""
    f = sizes.model.expert_size
    return Finding("expert width", _multiple(f, 256, 64), str(f), None,
                   "" if f % 256 == 0 else f"model.expert_size={-(-f // 256) * 256}",
                   "The SwiGLU width must be a multiple of the tile, not 8d/3 rounded blindly.", _ANTHONY)  # fmt: skip


def rows(sizes: Sizes) -> Finding:
    """The tokens of a micro-batch on a device are a multiple of 64."""
    t = sizes.tokens
    return Finding("tokens of a micro-batch", _multiple(t, 64, 16), f"{t:,}", None,
                   "" if t % 64 == 0 else "change context or micro_batch", "Rows of every product fill whole tiles.",
                   _ANTHONY)  # fmt: skip


def micro_batch(sizes: Sizes) -> Finding:
    """The micro-batch is as large as the memory allows."""
    more = bool(sizes.fits_twice)
    return Finding("micro-batch", "WARN" if more else "PASS", f"{sizes.tokens:,} tokens", None,
                   "twice the micro_batch fits" if more else "",
                   "Every micro-batch reads all parameters and updates all gradients once.", _ANTHONY)  # fmt: skip


def saturating(sizes: Sizes) -> Finding:
    """The experts' products have at least 200 GFLOP."""
    grouped = [p for p in products(sizes.model, sizes.tokens, sizes.axes["expert"]) if p.name.startswith("experts")]
    least = min(grouped, key=lambda p: p.flops)
    share = least.flops / SATURATING_FLOPS
    needed = math.ceil(sizes.tokens / share) if share else 0
    return Finding("size of the experts' products", "PASS" if share >= 1 else "WARN" if share >= 0.25 else "FAIL",
                   f"{least.flops / 1e9:,.0f} GFLOP", None,
                   "" if share >= 1 else f"about {needed:,} tokens in a micro-batch reach 200 GFLOP",
                   "Smaller products do not reach the peak of a MI300X.", _ZAYA)  # fmt: skip


def depth(sizes: Sizes) -> Finding:
    """The contracted size of large products is above 1,024."""
    weak = [p.name for p in products(sizes.model, sizes.tokens) if p.depth <= WEAK_DEPTH and p.name != "convolution"]
    return Finding("contracted sizes", "WARN" if weak else "PASS", ", ".join(weak) or "all above 1,024", None,
                   "" if not weak else "a wider contraction, if the architecture is yours to choose",
                   "Products that contract 1,024 are slow and uneven; those that contract 7,168 are smooth.",
                   _ZAYA)  # fmt: skip


def wave_efficiency(product: Product, units: int) -> float:
    """Return the share of work in the last, partial wave of tiles and in partial tiles that is useful.

    Args:
      product: the product; the tiles of its groups fill waves together.
      units: compute units, each of which computes one tile of `TILE` × `TILE` at a time.
    """
    tiles = product.groups * math.ceil(product.rows / TILE) * math.ceil(product.columns / TILE)
    waves = math.ceil(tiles / units)
    useful = product.groups * product.rows * product.columns / TILE**2
    return useful / (waves * units)


def waves(sizes: Sizes) -> Finding:
    """Tiles fill whole waves of the compute units: at least 90 % of them, weighted by FLOPs."""
    work = products(sizes.model, sizes.tokens, sizes.axes["expert"])
    useful = {p: wave_efficiency(p, sizes.hardware.units) for p in work}
    times = {p: p.times * p.flops / useful[p] for p in work}
    lost = {p: times[p] * (1 - useful[p]) for p in work}
    loss, worst = sum(lost.values()) / sum(times.values()), max(lost, key=lambda p: lost[p])
    status = "PASS" if loss <= 0.1 else "WARN" if loss <= 0.25 else "FAIL"
    return Finding("waves of tiles", status, f"{worst.name}: {useful[worst]:.0%} useful",
                   loss, "" if status == "PASS" else "more tokens in a micro-batch",
                   f"Tiles of {TILE}² run in waves of {sizes.hardware.units}; the last wave is seldom full.",
                   _ANTHONY)  # fmt: skip


def whole_nodes(sizes: Sizes) -> Finding:
    """A group of devices has one device of a node or all of them, where devices are linked in pairs."""
    sheet, paired = sizes.hardware, sizes.hardware.link < sizes.hardware.intra_node
    partial = {axis: n for axis, n in sizes.in_node.items() if 1 < n < sheet.node_size} if paired else {}
    loss = max((1 - (n - 1) * sheet.link / sheet.intra_node for n in partial.values()), default=0.0)
    value = ", ".join(f"{axis}: {n} of {sheet.node_size}" for axis, n in (partial or sizes.in_node).items())
    return Finding("whole nodes", "WARN" if partial else "PASS", value or "no groups", None if not partial else loss,
                   "" if not partial else f"1 or {sheet.node_size} devices along this axis",
                   "Each pair of devices has its own xGMI link, so part of a node uses part of the bandwidth. The loss "
                   "is that of the collective.", _ZAYA)  # fmt: skip


def unsharded(sizes: Sizes) -> Finding:
    """Parameters are not sharded by layer while the phase fits without."""
    needless = bool(sizes.fits_unsharded)
    return Finding("data parallelism first", "WARN" if needless else "PASS", f"fsdp {sizes.axes['fsdp']}", None,
                   "the phase fits with fsdp=1" if needless else "",
                   "ZeRO-1 sends parameters and gradients once a step, FSDP in every micro-batch.", _ZAYA)  # fmt: skip


def buffers(sizes: Sizes) -> Finding:
    """Messages of parameters saturate the network."""
    value = f"{sizes.message / 1e6:,.0f} MB" if sizes.message else "none"
    reason = "A buffer at the saturation point uses the links fully; a larger one overlaps less."
    knee = sizes.measured.knee
    if not sizes.message or knee is None:
        return Finding("size of messages", "OPEN" if sizes.message else "PASS", value, None,
                       "--measured FOLDER, with a result of machine collectives" if sizes.message else "", reason,
                       _ZAYA)  # fmt: skip
    # At the knee, 90 % of the bandwidth is reached; time = α + S / β with α = knee / 9 / β.
    loss = 1 - sizes.message / (sizes.message + knee / 9)
    return Finding("size of messages", "PASS" if sizes.message >= knee else "WARN",
                   f"{value}, saturated at {knee / 1e6:,.2g} MB", loss,
                   "" if sizes.message >= knee else "fewer devices along fsdp, or a larger model", reason,
                   _ZAYA)  # fmt: skip


def expert_speed(sizes: Sizes) -> Finding:
    """The experts' grouped products reach 80 % of the speed of large dense ones."""
    share, rows = sizes.measured.experts, sizes.tokens * rows_per_token(sizes.model) // sizes.model.num_experts
    rule, value = "speed of the experts", f"{rows:,} tokens each"
    reason = "With few tokens each, grouped products do not fill the matrix units."
    if share is None:
        return Finding(rule, "OPEN", value, None, "--measured FOLDER, with a result of machine gemm", reason, _ANTHONY)
    return Finding(rule, "PASS" if share >= 0.8 else "WARN" if share >= 0.5 else "FAIL",
                   f"{value}, {share:.0%} of the fastest square", max(0.0, 1 - share),
                   "" if share >= 0.8 else "more tokens in a micro-batch, or fewer, wider experts", reason,
                   _ANTHONY)  # fmt: skip


def whole_instructions(sizes: Sizes) -> Finding:
    """Contracted sizes are multiples of 32, the depth of a matrix instruction."""
    depths = {product.depth for product in products(sizes.model, sizes.tokens)} | {sizes.model.router_size}
    wrong = sorted(depth for depth in depths if depth % _INSTRUCTION)
    return Finding("depth of instructions", "FAIL" if wrong else "PASS", ", ".join(map(str, wrong or sorted(depths))),
                   None, f"widths in multiples of {_INSTRUCTION}" if wrong else "",
                   "A matrix instruction of a MI300X multiplies 16 to 32 contracted elements at a time.",
                   _MFMA)  # fmt: skip


def strides(sizes: Sizes) -> Finding:
    """Rows whose length is a multiple of 4 KiB are not slower than others, where the hidden size makes such rows."""
    length, speed = sizes.model.hidden_size * 2, sizes.measured.stride  # bytes in bf16
    rule, value = "length of rows", f"{length:,} bytes"
    reason = "Rows of a multiple of 4 KiB can compete for the same part of the memory or of a cache."
    if length % 4096:
        return Finding(rule, "PASS", value, None, "", reason, _ANTHONY)
    if speed is None:
        return Finding(rule, "OPEN", value, None, "--measured FOLDER, with a result of machine gemm", reason, _ANTHONY)
    good = speed >= 0.95
    return Finding(rule, "PASS" if good else "WARN", f"{value}, {speed:.0%} of the speed of other widths",
                   max(0.0, 1 - speed), "" if good else f"model.hidden_size={sizes.model.hidden_size + 64}", reason,
                   _ANTHONY)  # fmt: skip


RULES: Sequence[Callable[[Sizes], Finding]] = (
    vocabulary, head_dim, latent_widths, expert_width, rows, micro_batch, saturating, depth, waves, whole_nodes,
    unsharded, buffers, expert_speed, whole_instructions, strides,
)  # fmt: skip
