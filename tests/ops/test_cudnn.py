"""cuDNN's attention without a GPU: the packing, the call, and all around it with an emulation of what cuDNN documents.

Attention itself is checked on a GPU only: by the trial before a run, and by `make gpu-report`.
"""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention_tiles import AttentionInputs
from tests.helpers import seeds
from tests.kernel_helpers import kernel, lower, shape, traced_kernels
from tests.ops.document_attention import attend, attend_backward, check_any_packed, check_packed, differentiated
from tests.ops.test_attention_kernel import BF16, documents
from zaya_jax.ops.kernel_table import parse_table, sources_digest
from zaya_jax.ops.packing import pack
from zaya_jax.ops.registry import OPERATIONS, pins_on, select_kernels
from zaya_jax.ops.selfcheck import EXAMPLE
from zaya_jax.ops.target import Target

H200 = Target("cuda", "NVIDIA H200", "sm_90")


# --- the packing -----------------------------------------------------------------------------------------------


def runs(row):
    """(document, length) of each stretch of equal numbers."""
    return [(number, len([*group])) for number, group in itertools.groupby(row)]


def flattened(table, fill):
    """As jax documents it: the numbers of all rows that are not negative move to the left; `fill` takes the rest."""
    numbers = [number for row in table for number in row if number >= 0]
    return numbers + [fill] * (np.size(table) - len(numbers))


packed = jax.jit(pack, static_argnums=2)


@settings(max_examples=250)
@given(data=st.data(), sizes=st.sampled_from([(1, 2, 2), (2, 9, 10), (3, 16, 24), (4, 24, 12)]))
def test_the_packing_is_what_jax_documents(data, sizes):
    rows, length, room = sizes
    counts = [data.draw(st.sampled_from([0, 1, 2, length // 2, length])) for _ in range(rows)]
    cuts = [[0, *sorted(data.draw(st.permutations(range(1, length)))[:count]), length] for count in counts]
    padded = [data.draw(st.sampled_from(["none", "behind", "before", "all"])) for _ in range(rows)]
    segments = np.zeros((rows, length), np.int32)
    for row, cut, padding in zip(segments, cuts, padded, strict=True):
        for number, (start, stop) in enumerate(itertools.pairwise(cut), 1):
            row[start:stop] = number
        if padding != "none":
            row[{"behind": slice(cut[-2], None), "before": slice(cut[1]), "all": slice(None)}[padding]] = 0
    lengths, starts, rank, fits = map(np.asarray, packed(segments, segments, room))
    each = [runs(row) for row in segments]
    assert fits == (sum(map(len, each)) <= room)
    if not fits:
        return
    widest = max(room // rows, *map(len, each))
    within = [[*itertools.accumulate((size for _, size in row[:-1]), initial=0)] for row in each]
    offsets = [[at + index * length for at in row] + [-1] * (widest + 1 - len(row)) for index, row in enumerate(within)]
    sizes_of = [[size for _, size in row] + [-1] * (widest - len(row)) for row in each]
    assert lengths.tolist() == flattened(sizes_of, 0)[:room]
    assert starts.tolist() == flattened(offsets, rows * length)[: room + 1]
    assert rank.tolist() == [number for number, size in enumerate(lengths) for _ in range(size)]


@pytest.mark.parametrize(("queries", "keys", "fits"), [
    ([[1, 1, 2, 2]], [[1, 1, 2, 2]], True),
    ([[1, 2, 2, 1]], [[1, 2, 2, 1]], False),
    ([[1, 1, 0, 1]], [[1, 1, 0, 1]], False),
    ([[1, 1, 2, 2]], [[1, 1, 1, 2]], False),
    ([[2, 2, 0, 5]], [[2, 2, 0, 5]], True),
    ([[1, 2, 3, 4]], [[1, 2, 3, 4]], False),
])  # fmt: skip
def test_documents_that_are_apart_differ_or_are_too_many_do_not_fit(queries, keys, fits):
    assert bool(pack(jnp.asarray(queries), jnp.asarray(keys), 3).fits) == fits


# --- the call --------------------------------------------------------------------------------------------------


def arrays_of(b, s, h, k, c):
    q, kv, segments = shape(b, s, h, c, dtype=BF16), shape(b, s, k, c, dtype=BF16), shape(b, s, dtype=jnp.int32)
    return q, kv, kv, q, segments, segments


def calls(lowered):
    """The calls of cuDNN in a lowered program: name, types and layouts, configuration without zeros."""
    found = {}

    def inside(operation):
        if operation.name == "stablehlo.custom_call" and "cudnn" in str(operation.attributes["call_target_name"]):
            attributes = operation.attributes
            config = json.loads(attributes["backend_config"].value)["cudnn_fmha_backend_config"]
            types = [[str(x.type) for x in values] for values in (operation.operands, operation.results)]
            layouts = [str(attributes[name]) for name in ("api_version", "result_layouts")]
            found[str(attributes["call_target_name"])] = (types, layouts, without_zeros(config))
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    inside(inner.operation)

    inside(lowered.compiler_ir().operation)
    return found


def without_zeros(value):
    """As protocol buffers read JSON: numbers may be text, and what is missing is 0."""
    if isinstance(value, dict):
        return {key: kept for key, inner in value.items() if (kept := without_zeros(inner)) not in (0, [], {}, None)}
    if isinstance(value, list):
        return [without_zeros(inner) for inner in value]
    if isinstance(value, str) and value.endswith("INVALID"):
        return 0
    return int(value) if isinstance(value, str) and value.isdecimal() else value


@pytest.mark.parametrize("window", [None, 100])
def test_the_call_is_the_one_that_jax_makes(monkeypatch, window):
    from jax._src.cudnn import fused_attention_stablehlo as of_jax

    for name, answer in {"check_cudnn_version": 91000, "check_compute_capability": True,
                         "is_cuda_compute_capability_equal": False}.items():  # fmt: skip
        monkeypatch.setattr(of_jax, name, lambda *_, answer=answer: answer)
    *arrays, segments, _ = arrays_of(2, 2048, 8, 2, 128)
    tables = shape(2, 4, dtype=jnp.int32), shape(2, 5, dtype=jnp.int32)

    def theirs(q, k, v, do, lengths, offsets):
        run = functools.partial(of_jax.dot_product_attention, q_seqlen=lengths, kv_seqlen=lengths, q_offsets=offsets,
                                kv_offsets=offsets, scale=128**-0.5, mask_type=of_jax.MaskType.PADDING_CAUSAL,
                                sliding_window_length=window)  # fmt: skip
        return jax.vjp(run, q, k, v)[1](do)

    ours = functools.partial(differentiated, kernel("attention", "h200", "cudnn"), window)
    mine = calls(lower(ours, *arrays, segments, segments, platform="cuda"))
    expected = calls(lower(theirs, *arrays, *tables, platform="cuda"))
    assert {*mine} == {'"__cudnn$fmhaSoftmax"', '"__cudnn$fmhaSoftmaxBackward"'}
    assert mine.keys() == expected.keys()
    for name, (types, layouts, config) in mine.items():
        of_theirs = expected[name]
        # jax passes lengths and places with an axis of rows; cuDNN reads them one after the other.
        assert types[0][:-4] == of_theirs[0][0][:-4]
        assert types[1] == of_theirs[0][1]
        assert layouts == of_theirs[1]
        assert config == {key: value for key, value in of_theirs[2].items() if key != "seed"}, "no dropout, no seed"


# --- around the call -------------------------------------------------------------------------------------------


def emulated_call(target, results, *, legacy_backend_config, **_):
    """What cuDNN documents: documents start at places of elements; what no document has is not written (here NaN)."""
    config = json.loads(legacy_backend_config)["cudnn_fmha_backend_config"]
    window = config["sliding_window_length"]
    assert (config["mask_type"], target[:18]) == ("PADDING_CAUSAL", "__cudnn$fmhaSoftma")

    def run(*operands):
        *floats, lengths, key_lengths, places, key_places = (np.asarray(x) for x in operands)
        assert (lengths == key_lengths).all()
        q, k, v = (x.astype(np.float32) for x in floats[:3])
        _, s, h, c = q.shape
        kv, stats = k.shape[2], np.full((len(lengths), h, s), np.nan, np.float32)
        out, *gradients = (np.full(x.shape, np.nan, np.float32) for x in (q, q, k, v))
        assert config["max_seg_per_batch"] * q.shape[0] == len(lengths) == len(places) - 1
        for index, (size, place, key_place) in enumerate(zip(lengths, places[:-1], key_places[:-1], strict=True)):
            own = slice(place // (h * c), place // (h * c) + size)
            keys = slice(key_place // (kv * c), key_place // (kv * c) + size)
            arrays = [x.reshape(-1, *x.shape[2:])[at] for x, at in ((q, own), (k, keys), (v, keys))]
            if "Backward" not in target:
                out.reshape(-1, h, c)[own], stats[index, :, :size] = attend(*arrays, window, config["fmha_scale"])
                continue
            lse = floats[3][index, :, :size]
            do, o = (x.astype(np.float32).reshape(-1, h, c)[own] for x in floats[4:6])
            parts = attend_backward(*arrays, o, lse, do, window, config["fmha_scale"])
            for total, part, at in zip(gradients, parts, (own, keys, keys), strict=True):
                total.reshape(-1, *total.shape[2:])[at] = part
        given = gradients if "Backward" in target else [out]
        more = [] if "Backward" in target else [stats]
        full = [*(np.swapaxes(x, 1, 2) for x in given), *more, np.zeros(0, np.uint8)]
        return [x.astype(result.dtype) for x, result in zip(full, results, strict=True)]

    return lambda *operands: jax.pure_callback(run, results, *operands)


@pytest.fixture(scope="module")
def emulated():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.ffi, "ffi_call", emulated_call)
        yield


@settings(max_examples=10)
@given(data=st.data(), seed=seeds(), how=st.sampled_from([("cudnn", None), ("cudnn", 17), ("cudnn_forward", None)]))
def test_around_an_emulated_cudnn_it_equals_the_reference(emulated, data, seed, how):
    check_packed(*how, data.draw(documents(2, 48)), seed)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["cudnn", "cudnn_forward"])
@given(data=st.data(), seed=seeds())
def test_around_an_emulated_cudnn_it_equals_the_reference_in_any_shape(emulated, name, data, seed):
    check_any_packed(name, data, seed)


def test_calls_that_cudnn_does_not_take_run_the_pallas_kernels():
    attend = kernel("attention", "h200", "cudnn")
    one, cache = shape(2, 1, 8, 128, dtype=BF16), shape(2, 64, 2, 128, dtype=BF16)
    decode = traced_kernels(lambda *x: attend(*x, query_offset=63), one, cache, cache)
    assert decode == ["attention_decode", "attention_join"]
    q, offset = shape(2, 64, 8, 128, dtype=BF16), shape(dtype=jnp.int32)
    assert traced_kernels(lambda i, *x: attend(*x, query_offset=i), offset, q, cache, cache) == ["attention"]
    huge = AttentionInputs(shape(2**15, 64, 8, 128, dtype=BF16), *[shape(2**15, 64, 2, 128, dtype=BF16)] * 2)
    assert traced_kernels(attend, huge.q_bshc, huge.k_btkc, huge.v_btkc) == ["attention"]


# --- the selection ---------------------------------------------------------------------------------------------


def test_pallas_stays_the_default_and_a_pin_selects_cudnn_where_there_is_cudnn():
    parts = ("partial_attention", "partial_attention_gradient")
    assert select_kernels(H200, EXAMPLE, "bfloat16").chosen["attention"] == "pallas"
    pinned = select_kernels(H200, EXAMPLE, "bfloat16", None, {"attention": "cudnn"})
    assert [pinned.chosen[name] for name in ("attention", *parts)] == ["cudnn", "pallas", "pallas"]
    assert "attention (cudnn)" in str(pinned)


@pytest.mark.parametrize(("target", "dtype", "words"), [
    (Target("cuda", "NVIDIA A100", "sm_80"), "bfloat16", "needs an NVIDIA GPU of sm_90 or later, not sm_80"),
    (Target("cuda", "unknown"), "bfloat16", "not cuda"),
    (H200, "float32", "needs arrays in bfloat16, not float32"),
    (Target("rocm", "AMD Instinct MI300X", "gfx942"), "bfloat16", "MI300X has no such kernel"),
])  # fmt: skip
def test_what_cudnn_cannot_do_is_refused_before_a_run(target, dtype, words):
    with pytest.raises(ValueError, match=f"ops.attention=cudnn cannot be used: .*{words}"):
        select_kernels(target, EXAMPLE, dtype, None, {"attention": "cudnn"})
    assert "cudnn" in {each.name for each in OPERATIONS["attention"].kernels}


def test_parts_of_ring_attention_keep_their_kernel_where_cudnn_was_measured_to_be_fastest():
    sources = sources_digest(*OPERATIONS["attention"].modules)
    size = {"dtype": "bfloat16", "rows": 4096, "widths": [8, 2, 128], "implementation": "cudnn"}
    sizes = [{**size, "tiles": {"packed_documents": [[256], 1, 1]}}]
    tree = {"device": "NVIDIA H200", "operations": {"attention": {"sources": sources, "sizes": sizes}}}
    table = parse_table(tree, "NVIDIA H200", "a table")
    selection = select_kernels(H200, EXAMPLE, "bfloat16", table)
    assert selection.variants("attention")[0].variant == "cudnn (256/1/1)"
    assert selection.chosen["partial_attention"] == "pallas"
    assert "attention was not measured" not in str(selection)
    simulated, sentence = selection.without_libraries()
    assert "pallas for cudnn (attention)" in sentence
    assert simulated.variants("attention")[0].variant == "pallas"
    assert simulated.without_libraries() == (simulated, "")


def test_a_simulation_has_the_pins_of_its_platform():
    pinned = {"attention": "cudnn", "experts": "pallas", "cca_mix": "reference"}
    assert dict(pins_on("cuda", pinned)) == pinned
    assert dict(pins_on("rocm", pinned)) == {"experts": "pallas", "cca_mix": "reference"}
    assert dict(pins_on("cpu", pinned)) == {"cca_mix": "reference"}
