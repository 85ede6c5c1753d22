"""Count the launches of a layer and the bytes that each operation moves, with and without kernels, without a GPU.

Launches are counted in lowered programs (`stablehlo`), and bytes of kernels by simulating their programs
(`kernel_bytes`). For XLA's launches, the bytes are those of the arrays that they read and write. All figures are for
ROCm; on CUDA only the tile sizes differ.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zaya_jax.config import ModelConfig
from zaya_jax.machine.proxies.codegen import lower
from zaya_jax.machine.proxies.kernel_bytes import CACHE, Traffic, kernel_bytes
from zaya_jax.machine.proxies.kernel_cases import EIGHT_B, STEPS, Case, Sizes, cases, passes
from zaya_jax.machine.proxies.stablehlo import Launches, count_launches
from zaya_jax.machine.result import describe_run, write_result
from zaya_jax.model.attention import Context
from zaya_jax.model.layers import rotary_table, segment_positions
from zaya_jax.model.tree import compute_dtypes, map_variables, roles
from zaya_jax.model.zaya import POLICIES, Block
from zaya_jax.ops.registry import KernelSelection, preferred_kernels
from zaya_jax.ops.target import Target

TARGET = Target("rocm", "gfx942", "gfx942")
KERNELS, REFERENCES = preferred_kernels(TARGET), KernelSelection(TARGET)
# The 8B's widths, but few enough rows, experts and matrices to simulate every program. Ratios to the minimum hardly
# depend on them; parameters and partial sums, whose size is fixed, weigh more here than in training.
WALKED = EIGHT_B._replace(tokens=4096, sequence=4096, experts=4, matrices=(1, 2048, 4096), decoded=(1, 32768))
LAYER = ModelConfig(
    vocab_size=256, hidden_size=EIGHT_B.width, num_layers=1, num_query_heads=EIGHT_B.query_heads,
    num_kv_heads=EIGHT_B.kv_heads, head_dim=EIGHT_B.channels, num_experts=EIGHT_B.experts,
    expert_size=EIGHT_B.expert_width, router_size=256, max_positions=4096,
)  # fmt: skip


def bench_launches(output: str | None, sizes: Sizes = WALKED) -> dict[str, Any]:
    """Count launches of a layer and bytes of each operation, print both, and write them to `output`.

    Args:
      output: JSON file, written after each operation; None for no file.
      sizes: sizes of the operations whose bytes are counted.

    Returns:
      What was written: `layer`, the launches of each pass with `references` and with `kernels` (`told`); `operations`,
      the launches and bytes of each case (`operation_bytes`); `kernels`, the bytes of each kernel (`Traffic`).
    """
    result = describe_run("launches and bytes", f"the 8B's layer in bfloat16; bytes: {sizes}", "the references",
                          ("flax",))  # fmt: skip
    result |= {"target": TARGET.device_kind, "cache_bytes": CACHE, "layer": {}, "operations": {}, "kernels": {}}
    for name, backward in (("forward", False), ("forward and backward", True)):
        both = {"references": REFERENCES, "kernels": KERNELS}
        counted = {side: layer_launches(LAYER, 4096, selection, backward=backward) for side, selection in both.items()}
        result["layer"][name] = {side: told(launches) for side, launches in counted.items()}
        said = ", ".join(f"{launches.total} with {side}{_loops_in_words(launches)}"
                         for side, launches in counted.items())  # fmt: skip
        print(f"Launches of a layer, {name}: {said}.", flush=True)
    for name, case in cases(sizes, "bfloat16").items():
        row, kernels = operation_bytes(name, case, cases(sizes, "bfloat16"))
        result["operations"][name] = row
        result["kernels"] |= {kernel.name: kernel._asdict() | {"ratio": round(kernel.moved / kernel.least, 3)}
                              for kernel in kernels}  # fmt: skip
        traffic = {side: "unknown (loops)" if row[side]["ratio"] is None else f"{row[side]['ratio']:.2f}"
                   for side in ("kernels", "references")}  # fmt: skip
        print(f"{name}: bytes moved / minimum {traffic['kernels']} with kernels, {traffic['references']} with "
              f"references; launches {row['kernels']['launches']['total']} with kernels, "
              f"{row['references']['launches']['total']} with references", flush=True)  # fmt: skip
        write_result(result, output)
    return result


def _loops_in_words(launches: Launches) -> str:
    return f" (and {sum(launches.in_loops)} per iteration of its loops)" if launches.loops else ""


def told(launches: Launches) -> dict[str, Any]:
    """Convert launches to JSON; `in_loops` counts one iteration of each loop."""
    return {
        "total": launches.total,
        "kernels": dict(launches.kernels),
        "products": launches.products,
        "others": dict(launches.others),
        "fusions": launches.fusions,
        "in_loops": launches.in_loops,
    }


def layer_launches(model: ModelConfig, tokens: int, kernels: KernelSelection, *, backward: bool) -> Launches:
    """Count the launches of a bf16 layer over a row of `tokens`: forward, or with `backward` both passes."""
    block, x_bsd, state_bsr = _layer(model, tokens)
    ops = kernels.ops

    def forward(block: Block, x_bsd: jax.Array, state_bsr: jax.Array) -> tuple[jax.Array, ...]:
        segments_bs = jnp.ones(x_bsd.shape[:2], jnp.int32)
        table = rotary_table(segment_positions(segments_bs), model.rotary_size, model.rope_base)
        context = Context(segments_bs, segments_bs, {model.rope_base: table})
        x_bsd, state_bsr, counts, _ = block(x_bsd, state_bsr, context, None, ops)
        return x_bsd, state_bsr, counts

    def both(block: Block, x_bsd: jax.Array, state_bsr: jax.Array, *cotangents: jax.Array) -> Any:
        kept = jax.checkpoint(forward, policy=POLICIES["dots"], prevent_cse=False)
        out, pull, counts = jax.vjp(lambda *args: _split_aux(kept(*args)), block, x_bsd, state_bsr, has_aux=True)
        return out, counts, pull(cotangents)

    if backward:
        lowered = lower(both, block, x_bsd, state_bsr, x_bsd, state_bsr, target=kernels.target)
    else:
        lowered = lower(forward, block, x_bsd, state_bsr, target=kernels.target)
    return count_launches(lowered)


def _split_aux(outputs: tuple[jax.Array, ...]) -> tuple[Any, Any]:
    return outputs[:2], outputs[2]


def _layer(model: ModelConfig, tokens: int) -> tuple[Any, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Return shapes of a block in its compute dtypes, of the residual stream, and of the router's state."""
    block: Any = jax.eval_shape(functools.partial(Block, model, model.layer_kinds[0]), jax.random.key(0))
    dtypes = compute_dtypes(roles(block), jnp.bfloat16)
    block = map_variables(block, lambda name, x: jax.ShapeDtypeStruct(x.shape, dtypes.get(name, x.dtype)))  # type: ignore
    x_bsd, state_bsr = (jax.ShapeDtypeStruct((1, tokens, width), jnp.float32)
                        for width in (model.hidden_size, model.router_size))  # fmt: skip
    return block, x_bsd, state_bsr


def operation_bytes(name: str, case: Case, every: dict[str, Case]) -> tuple[dict[str, Any], list[Traffic]]:
    """Count the launches and bytes of a case with kernels and with references.

    A backward case includes its forward pass.

    Args:
      name: name of the case.
      case: the case.
      every: all cases by name, to find the forward pass of a backward case.

    Returns:
      `least`, the minimum bytes of the passes; for `kernels` and `references` their `launches`, `bytes`, and `ratio` of
      bytes to the minimum (None if a loop has an unknown number of iterations); and the traffic of each kernel.
    """
    least = case.bytes + (every[name.removesuffix(" backward")].bytes if case.backward else 0)
    kernels = kernel_bytes(*_flat(passes(case, KERNELS)))
    row: dict[str, Any] = {"least": least}
    for side, selection in (("references", KERNELS.without(case.operations)), ("kernels", KERNELS)):
        function, arguments = passes(case, selection)
        launches = count_launches(lower(function, *arguments, target=TARGET))
        moved = sum(kernel.moved for kernel in kernels) if side == "kernels" else 0
        by_xla = _xla_bytes(launches, STEPS if name == "muon" else None)
        total = None if by_xla is None else moved + by_xla
        row[side] = {"launches": told(launches), "bytes": total,
                     "ratio": None if total is None else round(total / least, 3)}  # fmt: skip
    return row, kernels


def _flat(call: tuple[Callable[..., Any], tuple[Any, ...]]) -> tuple[Any, ...]:
    return (call[0], *call[1])


def _xla_bytes(launches: Launches, iterations: int | None) -> int | None:
    """Return the bytes of all launches except kernels, with `iterations` of each loop; None if it is unknown."""
    if launches.loops and iterations is None:
        return None
    return launches.bytes + sum((_xla_bytes(loop, iterations) or 0) * (iterations or 0) for loop in launches.loops)
