"""PyTorch counterparts of the kernels, at the sizes of `kernel_cases`."""

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

from zaya_jax.lab.kernel_cases import STEPS, Sizes
from zaya_jax.lab.result import require_packages

Call = Callable[[], Any]
Made = tuple[Callable[..., Any], list[Any]]  # a function, and its arguments


def peer_call(name: str, sizes: Sizes, dtype: str, device: str) -> tuple[Call, Call]:
    """Make a function that runs a case of `kernel_cases.cases` in PyTorch, and one that waits for all its calls.

    On a GPU ('cuda', ROCm devices, too), norms are compiled with `torch.compile`, and attention uses the flash kernel
    of `scaled_dot_product_attention`. InputError if PyTorch is not installed.
    """
    require_packages("parity", "torch")
    torch: Any = importlib.import_module("torch")  # an optional dependency, imported by name
    torch.manual_seed(0)
    with torch.device(device):
        function, arrays = PEERS[name](torch, sizes, getattr(torch, dtype), device == "cuda")
        if name.endswith(" backward"):
            call = _backward(torch, function, arrays)
        else:
            call = functools.partial(torch.no_grad()(function), *arrays)
    return call, torch.cuda.synchronize if device == "cuda" else lambda: None  # calls on a CPU are synchronous


def _backward(torch: Any, function: Callable[..., Any], arrays: list[Any]) -> Call:
    for array in arrays:
        array.requires_grad_()
    # Otherwise a compiled backward pass reuses the memory of saved tensors, and could be called only once.
    importlib.import_module("torch._functorch.config").donated_buffer = False  # type: ignore
    outputs = function(*arrays)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    cotangents = [torch.randn_like(output) for output in outputs]
    return lambda: torch.autograd.grad(outputs, arrays, cotangents, retain_graph=True)


def _residual_norm(torch: Any, sizes: Sizes, dtype: Any, gpu: bool) -> Made:
    shape = (sizes.tokens, sizes.width)

    def function(output: Any, stream: Any, *vectors: Any) -> tuple[Any, Any]:
        scale, bias, stream_scale, stream_bias, weight = vectors
        new = (output.float() + bias) * scale + (stream + stream_bias) * stream_scale
        return new, torch.nn.functional.rms_norm(new.to(dtype), shape[1:], weight.to(dtype), 1e-5)

    arrays = [torch.randn(shape, dtype=dtype), torch.randn(shape), *(torch.randn(sizes.width) for _ in range(5))]
    return torch.compile(function) if gpu else function, arrays


def _attention(torch: Any, sizes: Sizes, dtype: Any, gpu: bool, *, decode: bool = False) -> Made:
    """Attend with queries, keys and values [b, h, s, c]: all queries of a causal sequence, or one of a `decode`."""
    rows, keys = sizes.decoded if decode else (sizes.tokens // sizes.sequence, sizes.sequence)
    heads = ((sizes.query_heads, 1 if decode else keys), *[(sizes.kv_heads, keys)] * 2)
    attend: Any = torch.nn.functional.scaled_dot_product_attention
    backends: Any = importlib.import_module("torch.nn.attention")

    def function(q: Any, k: Any, v: Any) -> Any:
        with backends.sdpa_kernel(backends.SDPBackend.FLASH_ATTENTION) if gpu else contextlib.nullcontext():
            return attend(q, k, v, is_causal=not decode, enable_gqa=True)

    return function, [torch.randn(rows, *head, sizes.channels, dtype=dtype) for head in heads]


def _grouped(torch: Any, sizes: Sizes, dtype: Any, _: bool) -> Made:
    e, d, q = sizes.experts, sizes.width, 2 * sizes.expert_width
    ends = torch.arange(1, e + 1, dtype=torch.int32) * sizes.per_expert
    arrays = [torch.randn(e * sizes.per_expert, d, dtype=dtype), torch.randn(e, d, q, dtype=dtype)]
    return lambda x, w: torch._grouped_mm(x, w, offs=ends), arrays


def _gram_polynomial(torch: Any, sizes: Sizes, dtype: Any, _: bool) -> Made:
    def function(x: Any) -> Any:
        gram = x @ x.mT
        return torch.baddbmm(gram, gram, gram, beta=0.5, alpha=0.5)

    return function, [torch.randn(*sizes.matrices, dtype=dtype)]


def _muon(torch: Any, sizes: Sizes, *_: Any) -> Made:
    n, p, q = sizes.matrices  # torch's Muon always iterates in bf16
    matrices = [torch.nn.Parameter(torch.randn(q, p)) for _ in range(n)]
    for matrix in matrices:
        matrix.grad = torch.randn(q, p)
    rates = {"lr": 6e-4, "weight_decay": 0.1, "momentum": 0.95}
    optimizer = torch.optim.Muon(matrices, **rates, ns_steps=STEPS, adjust_lr_fn="match_rms_adamw")
    return optimizer.step, []


PEERS: dict[str, Callable[..., Made]] = {
    "residual_norm": _residual_norm,
    "residual_norm backward": _residual_norm,
    "attention": _attention,
    "attention backward": _attention,
    "attention of a decode": functools.partial(_attention, decode=True),
    "grouped_matmul": _grouped,
    "grouped_matmul backward": _grouped,
    "gram_polynomial": _gram_polynomial,
    "muon": _muon,
}
