"""The parts of a training step: scopes that name them in compiled programs and in traces."""

import re
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import jax

LAYERS: Literal["layers"] = "layers"  # scope of the scan over layers, in which the scopes of its parts are
LayerPart = Literal["norm", "attention", "cca_mix", "router", "dispatch", "experts"]
Part = Literal["embedding", LayerPart, "layers", "loss", "accumulation", "optimizer"]
PARTS: tuple[Part, ...] = get_args(Part)
OTHER = "other"
_PART = re.compile(rf"[(/](?:{'|'.join(PARTS)})(?=[)/]|$)")


def part(name: Part) -> AbstractContextManager[Any]:
    """Name what is traced within as a part of the step; within another part, the inner name counts.

    `norm` is RMSNorm and residual merges, `attention` has the projections, `cca_mix` is all between projections and
    scores, `dispatch` sorts and permutes tokens (kernels permute in `experts`), `layers` keeps activations and slices
    parameters, `loss` has the head, `accumulation` copies parameters to the compute dtype and sums gradients.
    """
    return jax.named_scope(name)


def part_of(op_name: str) -> str:
    """Return the part of the step that an instruction's jax path names; `OTHER` if it names none."""
    names = _PART.findall(f"/{op_name}")
    return names[-1][1:] if names else OTHER
