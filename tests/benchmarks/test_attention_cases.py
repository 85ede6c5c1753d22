"""The drawn cases of attention, with emulated kernels at a small size."""

import dataclasses

import numpy as np

from benchmarks.gpu_report import attention_cases
from benchmarks.gpu_report.attention_cases import draw_documents, draw_shape, measure_attention
from tests.report_helpers import check_form
from zaya_jax.ops import registry
from zaya_jax.ops.operation import Kernel


def test_kernels_are_right_refuse_or_are_named(monkeypatch):
    def too_small(_architecture, *qkv, **options):
        return 0.9 * attention_cases.attention(*qkv, **options)

    def unsupported(*_, **__):
        return "It takes nothing."

    operation = registry.OPERATIONS["attention"]
    others = (Kernel("small", too_small, lambda *_, **__: "", ()), Kernel("idle", None, unsupported, ()))
    widened = dataclasses.replace(operation, kernels=(*operation.kernels, *others))
    monkeypatch.setitem(registry.OPERATIONS, "attention", widened)
    result = measure_attention(True)
    check_form("attention", result)
    pallas, small = (result["kernels"][name] for name in ("pallas", "small"))
    assert pallas["cases"] == small["cases"] == 4
    assert pallas["differ"] == 0
    assert 0 < pallas["error"] < 0.02 < small["error"]
    assert result["refused"] == {"idle: It takes nothing.": 4}
    assert "small has error" in result["failed"]
    assert "pallas" not in result["failed"]
    assert result["figures"]["error of pallas"] == [pallas["error"], "of 0.03"]


def test_what_is_drawn_has_every_kind():
    rng = np.random.default_rng(attention_cases._SEED)
    shapes = [draw_shape(rng, attention_cases._LENGTHS) for _ in range(attention_cases._SHAPES)]
    assert attention_cases._SHAPES * attention_cases._DRAWS >= 200
    assert {shape.queries == shape.keys for shape in shapes} == {True, False}
    assert {shape.window is None for shape in shapes} == {True, False}
    assert any(shape.offset and shape.heads[0] != shape.heads[1] for shape in shapes)
    of_mosaic = [shape for shape in shapes if not (shape.queries % 64 or shape.keys % 128)
                 and shape.heads[0] // shape.heads[1] % 2 == 0]  # fmt: skip
    assert {shape.channels for shape in of_mosaic} == {64, 128}
    assert {shape.window is None for shape in of_mosaic} == {shape.offset > 0 for shape in of_mosaic} == {True, False}
    drawn = np.concatenate([draw_documents(rng, 4, 64) for _ in range(100)])
    assert (drawn == 0).all(1).any(), "a row of padding"
    assert (drawn == 1).all(1).any(), "a row of one document"
    assert ((np.diff(drawn) != 0).sum(1) == 63).any(), "documents of one token"
