"""What kernels save before any GPU has run them: launches of a layer, and bytes of an operation, with and without them.

Launches are counted in lowered programs (`stablehlo`), bytes of kernels by walking through their programs
(`kernel_bytes`), and those of what XLA does around them from the arrays between its launches. Both count for ROCm;
CUDA's differ by tile sizes alone.
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
# The 8B's widths, with so few rows, experts and matrices that every program can be walked through. Ratios hardly depend
# on them; what does not grow with them (parameters, partial sums) weighs more here than in training.
WALKED = EIGHT_B._replace(tokens=4096, sequence=4096, experts=4, matrices=(1, 2048, 4096), decoded=(1, 32768))
LAYER = ModelConfig(
    vocab_size=256, hidden_size=EIGHT_B.width, num_layers=1, num_query_heads=EIGHT_B.query_heads,
    num_kv_heads=EIGHT_B.kv_heads, head_dim=EIGHT_B.channels, num_experts=EIGHT_B.experts,
    expert_size=EIGHT_B.expert_width, router_size=256, max_positions=4096,
)  # fmt: skip


def bench_launches(output: str | None, sizes: Sizes = WALKED) -> dict[str, Any]:
    """Count launches of a layer and bytes of each operation, print both, and write them to `output`.

    Returns:
      What was written: `layer` by pass, with `references` and `kernels` (`told`); `operations` by case, with launches,
      bytes and their ratio to the least there could be; `kernels`, each with its bytes.
    """
    result = describe_run("launches and bytes", f"the 8B's layer in bfloat16; bytes: {sizes}", "the references",
                          ("flax",))  # fmt: skip
    result |= {"target": TARGET.device_kind, "cache_bytes": CACHE, "layer": {}, "operations": {}, "kernels": {}}
    for name, backward in (("forward", False), ("forward and backward", True)):
        both = {"references": REFERENCES, "kernels": KERNELS}
        counted = {side: layer_launches(LAYER, 4096, selection, backward=backward) for side, selection in both.items()}
        result["layer"][name] = {side: told(launches) for side, launches in counted.items()}
        said = ", ".join(f"{side} {launches.total} and in loops {sum(launches.in_loops)} a turn"
                         for side, launches in counted.items())  # fmt: skip
        print(f"Launches of a layer, {name}: {said}.", flush=True)
    for name, case in cases(sizes, "bfloat16").items():
        found, kernels = operation_bytes(name, case, cases(sizes, "bfloat16"))
        result["operations"][name] = found
        result["kernels"] |= {one.name: one._asdict() | {"ratio": round(one.moved / one.least, 3)} for one in kernels}
        reference = found["references"]
        print(f"{name}: {found['kernels']['ratio']:.2f} times the least bytes, the references "
              f"{'in loops' if reference['ratio'] is None else format(reference['ratio'], '.2f')}; "
              f"{found['kernels']['launches']['total']} launches, the references "
              f"{reference['launches']['total']}", flush=True)  # fmt: skip
        write_result(result, output)
    return result


def told(launches: Launches) -> dict[str, Any]:
    """Launches as the result has them; `in_loops` is of one turn of each loop."""
    return {
        "total": launches.total,
        "kernels": dict(launches.kernels),
        "products": launches.products,
        "others": dict(launches.others),
        "fusions": launches.fusions,
        "in_loops": launches.in_loops,
    }


def layer_launches(model: ModelConfig, tokens: int, kernels: KernelSelection, *, backward: bool) -> Launches:
    """Launches of a layer of `model` in bf16 over one row of `tokens`, its backward pass with `remat: dots` added."""
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
        out, pull, counts = jax.vjp(lambda *given: _apart(kept(*given)), block, x_bsd, state_bsr, has_aux=True)
        return out, counts, pull(cotangents)

    if backward:
        lowered = lower(both, block, x_bsd, state_bsr, x_bsd, state_bsr, target=kernels.target)
    else:
        lowered = lower(forward, block, x_bsd, state_bsr, target=kernels.target)
    return count_launches(lowered)


def _apart(outputs: tuple[jax.Array, ...]) -> tuple[Any, Any]:
    return outputs[:2], outputs[2]


def _layer(model: ModelConfig, tokens: int) -> tuple[Any, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Shapes of a block in the dtypes that it computes in, of the stream and of the router's state."""
    block: Any = jax.eval_shape(functools.partial(Block, model, model.layer_kinds[0]), jax.random.key(0))
    dtypes = compute_dtypes(roles(block), jnp.bfloat16)
    block = map_variables(block, lambda name, x: jax.ShapeDtypeStruct(x.shape, dtypes.get(name, x.dtype)))  # type: ignore
    x_bsd, state_bsr = (jax.ShapeDtypeStruct((1, tokens, width), jnp.float32)
                        for width in (model.hidden_size, model.router_size))  # fmt: skip
    return block, x_bsd, state_bsr


def operation_bytes(name: str, case: Case, every: dict[str, Case]) -> tuple[dict[str, Any], list[Traffic]]:
    """Launches and bytes of a case by kernels and by references; with the backward pass come those of the forward.

    Args:
      name: of the case.
      case: the case.
      every: among which its forward pass is.

    Returns:
      `least` bytes, of each pass on its own, and by side `launches`, `bytes` and their `ratio` to the least, None
      where loops turn a number of times that is not known; then the traffic of each kernel.
    """
    least = case.bytes + (every[name.removesuffix(" backward")].bytes if case.backward else 0)
    kernels = kernel_bytes(*_flat(passes(case, KERNELS)))
    found: dict[str, Any] = {"least": least}
    for side, selection in (("references", KERNELS.without(case.operations)), ("kernels", KERNELS)):
        function, arguments = passes(case, selection)
        launches = count_launches(lower(function, *arguments, target=TARGET))
        moved = sum(one.moved for one in kernels) if side == "kernels" else 0
        around = _around(launches, STEPS if name == "muon" else None)
        total = None if around is None else moved + around
        found[side] = {"launches": told(launches), "bytes": total,
                       "ratio": None if total is None else round(total / least, 3)}  # fmt: skip
    return found, kernels


def _flat(made: tuple[Callable[..., Any], tuple[Any, ...]]) -> tuple[Any, ...]:
    return (made[0], *made[1])


def _around(launches: Launches, turns: int | None) -> int | None:
    """Bytes of all launches but kernels, with `turns` of each loop."""
    if launches.loops and turns is None:
        return None
    return launches.bytes + sum((_around(loop, turns) or 0) * (turns or 0) for loop in launches.loops)
