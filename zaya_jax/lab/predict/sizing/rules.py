"""The sizing rules, each a function of a phase's sizes (docs/reference.md §9, §10, and the papers that they name)."""

import dataclasses
import functools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from zaya_jax.config import Config, ModelConfig
from zaya_jax.config.stages import largest_stage
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import Hardware
from zaya_jax.hardware.measurements import complete, largest_fit, read_results
from zaya_jax.lab.predict.dry_run.estimate import estimate_phase, simulated_programs
from zaya_jax.lab.predict.dry_run.memory import local_copies
from zaya_jax.lab.predict.dry_run.traffic import group_devices
from zaya_jax.model.experts import rows_per_token
from zaya_jax.parallel.mesh import nontrivial_axes

Status = Literal["PASS", "WARN", "FAIL", "OPEN"]

TILE = 128  # rows and columns of a product's tile
SATURATING_FLOPS = 200e9  # of a product that reaches the peak of a MI300X
WEAK_DEPTH = 1024  # contracted sizes up to this one are slow and uneven on a MI300X
_INSTRUCTION = 32  # contracted elements that every bf16 matrix instruction divides
_ANTHONY = "Anthony et al., arXiv 2401.14489"
_ZAYA = "arXiv 2511.17127, §III"
_MEASURE_GEMM = "--measured FOLDER, with a result of machine gemm"


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
    """Measurements of the hardware; each is None if there is none."""

    knee: float | None = None  # bytes that saturate the network, by `machine collectives`
    experts: float | None = None  # speed of the experts' products over the fastest square's, by `machine gemm`
    stride: float | None = None  # speed of products that contract the hidden size over the median of others', too


class Sizes(NamedTuple):
    """The sizes of a phase."""

    model: ModelConfig  # the architecture
    tokens: int  # tokens of a micro-batch on one device
    axes: Mapping[str, int]  # devices along each mesh axis
    in_node: Mapping[str, int]  # by axis with more than one device, the devices of a group that share a node
    hardware: Hardware  # data sheet
    fits_twice: bool | None  # whether twice the micro-batch fits, by the dry run; None if the batch has no more
    fits_unsharded: bool | None  # whether the phase fits with `fsdp: 1`, by the same estimate; None if it has no FSDP
    message: int  # bytes of the smallest large all-gather of parameters; 0 if none
    measured: Measured  # on this hardware


class Finding(NamedTuple):
    """The verdict of a rule on a phase."""

    rule: str  # its name
    status: Status  # 'OPEN' if it needs a measurement that is missing
    value: str  # what it looked at
    loss: float | None  # predicted share of the time that is lost; None if it cannot be told
    advice: str  # what to change; '' if it passes
    reason: str  # why the rule holds
    source: str  # where it comes from


# Status, value, loss and advice of a `Finding`; the advice counts unless the rule holds.
Answer = tuple[Status, str, float | None, str]
Check = Callable[[Sizes], Answer]


def products(model: ModelConfig, tokens: int, experts: int = 1) -> list[Product]:
    """Return the products of layers and head, for a micro-batch's tokens on a device, evenly routed over `experts`."""
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


RULES: list[Callable[[Sizes], Finding]] = []


def _rule(name: str, source: str = _ANTHONY) -> Callable[[Check], Callable[[Sizes], Finding]]:
    """Add a rule to `RULES`, in their order; its docstring is the reason, in which {units} are the hardware's."""

    def add(check: Check) -> Callable[[Sizes], Finding]:
        @functools.wraps(check)
        def rule(sizes: Sizes) -> Finding:
            status, value, loss, advice = check(sizes)
            reason = " ".join((check.__doc__ or "").split()).format(units=sizes.hardware.units)
            return Finding(name, status, value, loss, "" if status == "PASS" else advice, reason, source)

        RULES.append(rule)
        return rule

    return add


def _multiple(value: int, good: int, fair: int) -> Status:
    return "PASS" if value % good == 0 else "WARN" if value % fair == 0 else "FAIL"


def _least(value: float, good: float, fair: float) -> Status:
    return "PASS" if value >= good else "WARN" if value >= fair else "FAIL"


@_rule("vocabulary")
def vocabulary(sizes: Sizes) -> Answer:
    """The vocabulary is a multiple of 64: the head's product needs whole tiles of columns."""
    v = sizes.model.vocab_size
    return _multiple(v, 64, 64), f"{v:,}", None, f"pad model.vocab_size to {-(-v // 64) * 64}"


@_rule("head width")
def head_dim(sizes: Sizes) -> Answer:
    """Heads are multiples of 128 wide, or of 64: few wide ones fill the matrix units better than many small ones."""
    c = sizes.model.head_dim
    return _multiple(c, 128, 64), str(c), None, "model.head_dim=128"


@_rule("latent widths")
def latent_widths(sizes: Sizes) -> Answer:
    """Compressed queries and keys are multiples of 64 wide: narrow products lose most by partial tiles."""
    q, k = sizes.model.query_size, sizes.model.kv_size
    return _multiple(math.gcd(q, k), 64, 64), f"{q} and {k}", None, "choose heads × head_dim as multiples of 64"


@_rule("expert width")
def expert_width(sizes: Sizes) -> Answer:
    """The SwiGLU width is a multiple of 256, or of 64: of the tile, not 8d/3 rounded blindly."""
    f = sizes.model.expert_size
    return _multiple(f, 256, 64), str(f), None, f"model.expert_size={-(-f // 256) * 256}"


@_rule("tokens of a micro-batch")
def rows(sizes: Sizes) -> Answer:
    """Tokens of a micro-batch on a device are a multiple of 64: rows of every product fill whole tiles."""
    return _multiple(sizes.tokens, 64, 16), f"{sizes.tokens:,}", None, "change context or micro_batch"


@_rule("micro-batch")
def micro_batch(sizes: Sizes) -> Answer:
    """The micro-batch fills the memory: each reads all parameters and updates all gradients once."""
    return "WARN" if sizes.fits_twice else "PASS", f"{sizes.tokens:,} tokens", None, "twice the micro_batch fits"


@_rule("size of the experts' products", _ZAYA)
def saturating(sizes: Sizes) -> Answer:
    """The experts' products have 200 GFLOP or more: smaller ones do not reach the peak of a MI300X."""
    grouped = [p for p in products(sizes.model, sizes.tokens, sizes.axes["expert"]) if p.name.startswith("experts")]
    flops = min(p.flops for p in grouped)
    share = flops / SATURATING_FLOPS
    needed = math.ceil(sizes.tokens / share) if share else 0
    advice = f"about {needed:,} tokens in a micro-batch reach 200 GFLOP"
    return _least(share, 1, 0.25), f"{flops / 1e9:,.0f} GFLOP", None, advice


@_rule("contracted sizes", _ZAYA)
def depth(sizes: Sizes) -> Answer:
    """Large products contract more than 1,024: those are slow and uneven, those that contract 7,168 are smooth."""
    weak = [p.name for p in products(sizes.model, sizes.tokens) if p.depth <= WEAK_DEPTH and p.name != "convolution"]
    advice = "a wider contraction, if the architecture is yours to choose"
    return "WARN" if weak else "PASS", ", ".join(weak) or "all above 1,024", None, advice


def wave_efficiency(product: Product, units: int) -> float:
    """Return the useful share of the waves in which `units` compute a product's tiles of `TILE` × `TILE`."""
    tiles = product.groups * math.ceil(product.rows / TILE) * math.ceil(product.columns / TILE)
    waves = math.ceil(tiles / units)
    useful = product.groups * product.rows * product.columns / TILE**2
    return useful / (waves * units)


@_rule("waves of tiles")
def waves(sizes: Sizes) -> Answer:
    """Tiles of 128² fill whole waves of {units} to 90 % by FLOPs; the last wave is seldom full."""
    work = products(sizes.model, sizes.tokens, sizes.axes["expert"])
    useful = {p: wave_efficiency(p, sizes.hardware.units) for p in work}
    times = {p: p.times * p.flops / useful[p] for p in work}
    lost = {p: times[p] * (1 - useful[p]) for p in work}
    loss, worst = sum(lost.values()) / sum(times.values()), max(lost, key=lambda p: lost[p])
    value = f"{worst.name}: {useful[worst]:.0%} useful"
    return _least(1 - loss, 0.9, 0.75), value, loss, "more tokens in a micro-batch"


@_rule("whole nodes", _ZAYA)
def whole_nodes(sizes: Sizes) -> Answer:
    """A group has one device of a node or all: on AMD each pair has its own link, and a part of a node few of them."""
    sheet = sizes.hardware
    partial = {axis: n for axis, n in sizes.in_node.items() if 1 < n < sheet.node_size and not sheet.switched}
    loss = max((1 - (n - 1) * sheet.link / sheet.intra_node for n in partial.values()), default=None)
    value = ", ".join(f"{axis}: {n} of {sheet.node_size}" for axis, n in (partial or sizes.in_node).items())
    advice = f"1 or {sheet.node_size} devices along this axis"
    return "WARN" if partial else "PASS", value or "no groups", loss, advice


@_rule("data parallelism first", _ZAYA)
def unsharded(sizes: Sizes) -> Answer:
    """Without need, no FSDP: it sends parameters and gradients in every micro-batch, ZeRO-1 once a step."""
    return "WARN" if sizes.fits_unsharded else "PASS", f"fsdp {sizes.axes['fsdp']}", None, "the phase fits with fsdp=1"


@_rule("size of messages", _ZAYA)
def buffers(sizes: Sizes) -> Answer:
    """Messages of parameters are at the saturation point: it uses the links fully; larger ones overlap less."""
    value, knee = f"{sizes.message / 1e6:,.0f} MB", sizes.measured.knee
    if not sizes.message:
        return "PASS", "none", None, ""
    if knee is None:
        return "OPEN", value, None, "--measured FOLDER, with a result of machine collectives"
    # At the knee, 90 % of the bandwidth is reached; time = α + S / β with α = knee / 9 / β.
    loss = 1 - sizes.message / (sizes.message + knee / 9)
    status, value = _least(sizes.message, knee, 0), f"{value}, saturated at {knee / 1e6:,.2g} MB"
    return status, value, loss, "fewer devices along fsdp, or a larger model"


@_rule("speed of the experts")
def expert_speed(sizes: Sizes) -> Answer:
    """The experts' grouped products reach 80 % of the speed of large dense ones; with few tokens each, they do not."""
    share, rows = sizes.measured.experts, sizes.tokens * rows_per_token(sizes.model) // sizes.model.num_experts
    value, advice = f"{rows:,} tokens each", "more tokens in a micro-batch, or fewer, wider experts"
    if share is None:
        return "OPEN", value, None, _MEASURE_GEMM
    return _least(share, 0.8, 0.5), f"{value}, {share:.0%} of the fastest square", max(0.0, 1 - share), advice


@_rule("depth of instructions", "AMD, CDNA 3 instruction set, V_MFMA")
def whole_instructions(sizes: Sizes) -> Answer:
    """Contracted sizes are multiples of 32: an instruction of a MI300X multiplies 16 to 32 of them at a time."""
    depths = {product.depth for product in products(sizes.model, sizes.tokens)} | {sizes.model.router_size}
    wrong = sorted(depth for depth in depths if depth % _INSTRUCTION)
    value = ", ".join(map(str, wrong or sorted(depths)))
    return "FAIL" if wrong else "PASS", value, None, f"widths in multiples of {_INSTRUCTION}"


@_rule("length of rows")
def strides(sizes: Sizes) -> Answer:
    """Rows of a multiple of 4 KiB are as fast as others: they can compete for one part of the memory or of a cache."""
    length, speed = sizes.model.hidden_size * 2, sizes.measured.stride  # bytes in bf16
    value, advice = f"{length:,} bytes", f"model.hidden_size={sizes.model.hidden_size + 64}"
    if length % 4096:
        return "PASS", value, None, ""
    if speed is None:
        return "OPEN", value, None, _MEASURE_GEMM
    return _least(speed, 0.95, 0), f"{value}, {speed:.0%} of the speed of other widths", max(0.0, 1 - speed), advice


def check_sizing(config: Config, devices: int, hardware: Hardware, measured: Measured) -> dict[str, list[Finding]]:
    """Return the findings of every rule, by phase; InputError if the layout does not suit the devices."""
    findings = {}
    for index, phase in enumerate(config.phases):
        sizes = _sizes(config, index, devices, hardware, measured)
        findings[phase.name] = [rule(sizes) for rule in RULES]
    return findings


def _sizes(config: Config, index: int, devices: int, hardware: Hardware, measured: Measured) -> Sizes:
    programs, phase = simulated_programs(config, devices), config.phases[index]
    estimate, program = estimate_phase(programs, index, hardware), programs[index]
    mesh, local, layers = program.placement.mesh, local_copies(program), config.model.num_layers
    sharded = mesh.shape["fsdp"] > 1
    in_node = {}
    for axis in nontrivial_axes(mesh, tuple(mesh.shape)):
        members = Counter(device // hardware.node_size for device in group_devices((axis,), mesh.shape))
        in_node[axis] = max(members.values())
    by_layer = [name for name, leaf in program.placement.leaves.items() if leaf.by_layer]
    shard = sum(local[name].size // layers * program.placement.dtypes[name].itemsize for name in by_layer)

    def fits(**changes: Any) -> bool:
        """True if the phase fits with a change, by the dry run's estimate; False if the change is not allowed."""
        phases = (*config.phases[:index], dataclasses.replace(phase, **changes), *config.phases[index + 1 :])
        try:
            changed = simulated_programs(dataclasses.replace(config, phases=phases), devices)
        except InputError:
            return False
        return estimate_phase(changed, index, hardware).memory.total <= hardware.allocatable

    twice = dataclasses.replace(config.batch_for(phase), micro_batch=2 * estimate.sequences)
    unsharded = dataclasses.replace(config.parallel_for(phase), data=None, fsdp=1)
    return Sizes(
        model=config.model,
        tokens=estimate.sequences * largest_stage(config, index).context // mesh.shape["context"],
        axes=dict(mesh.shape),
        in_node=in_node,
        hardware=hardware,
        fits_twice=fits(batch=twice) if estimate.micro_batches > 1 else None,
        fits_unsharded=fits(parallel=unsharded) if sharded else None,
        message=shard * mesh.shape["fsdp"] if sharded else 0,
        measured=measured,
    )


def read_measured(folder: str, source: str, model: ModelConfig) -> Measured:
    """Read what is measured in a folder that the flag `source` names; InputError if it is missing or damaged.

    Products of other sizes than the model's, or in another dtype than bf16, do not count.
    """
    results, d, f = read_results(Path(folder), source), model.hidden_size, model.expert_size
    with complete(f"{source} {folder} has a result"):
        fit, gemm = largest_fit(results.get("collectives", {}), "all_gather", "knee_bytes"), results.get("gemm", {})
        experts, offsets = [], {}
        for row in gemm.get("results", ()):
            if "warm_flops_per_second" not in row or gemm["dtype"] != "bfloat16":
                continue
            speed, family, depth = row["warm_flops_per_second"], row["family"], row["depth"]
            even = family == "experts" and row["name"].endswith("even, forward")
            if even and (row["columns"], depth) in ((2 * f, d), (d, f)):
                experts.append(speed / gemm["maximum"])
            if family == "stride" and depth - row["offset"] == d:
                offsets[row["offset"]] = speed
        others = [speed for offset, speed in offsets.items() if offset]
        stride = offsets[0] / statistics.median(others) if 0 in offsets and others else None
        return Measured(None if fit is None else float(fit["knee_bytes"]), min(experts, default=None), stride)
