"""Scheduled programs: loops, collectives and their groups, and predicted times, against cases worked by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.config import load_config
from zaya_jax.hardware.data_sheets import ASSUMPTIONS, HARDWARE, LINKS
from zaya_jax.lab.predict.compilers.collectives import collectives, device_groups, mesh_axes
from zaya_jax.lab.predict.compilers.compiled import failure_reason
from zaya_jax.lab.predict.compilers.hlo import Instruction, arrays, parse, shape_bytes, walk
from zaya_jax.lab.predict.compilers.predict import (
    Shares,
    _kernel_flops,
    instruction_work,
    launches,
    phase_shares,
    predict,
)
from zaya_jax.lab.predict.step_time import collective_seconds

H200 = HARDWARE["h200"]
# A loop of 20 layers in a loop of 4 micro-batches, and a gather that one fusion hides.
TEXT = """\
HloModule jit_train_step, is_scheduled=true

%slice_fused (param_0: bf16[20,1024,1024], param_1: s32[]) -> bf16[1024,1024] {
  %param_0 = bf16[20,1024,1024]{2,1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice.1 = bf16[1,1024,1024]{2,1,0} dynamic-slice(%param_0, %param_1, %zero, %zero), dynamic_slice_sizes={1,1024,1024}
  ROOT %bitcast.1 = bf16[1024,1024]{1,0} bitcast(%slice.1)
}

%update_fused (param_0.1: f32[20,1024], param_1.1: f32[1024], param_2.1: s32[]) -> f32[20,1024] {
  %param_0.1 = f32[20,1024]{1,0} parameter(0)
  %param_1.1 = f32[1024]{0} parameter(1)
  %param_2.1 = s32[] parameter(2)
  %row = f32[1,1024]{1,0} bitcast(%param_1.1)
  ROOT %updated = f32[20,1024]{1,0} dynamic-update-slice(%param_0.1, %row, %param_2.1, %param_2.1)
}

%layers (arg: (s32[], bf16[20,1024,1024])) -> (s32[], bf16[20,1024,1024]) {
  %arg = (s32[], bf16[20,1024,1024]{2,1,0}) parameter(0)
  %index = s32[] get-tuple-element(%arg), index=0
  %stack = bf16[20,1024,1024]{2,1,0} get-tuple-element(%arg), index=1
  %weights = bf16[1024,1024]{1,0} fusion(%stack, %index), kind=kLoop, calls=%slice_fused, metadata={op_name="jit(train_step)/jvp(layers)/while/body/dynamic_slice"}
  %x = (bf16[1024,1024]{1,0}, s8[33554432]{0}) custom-call(%weights, %weights), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  ROOT %out = (s32[], bf16[20,1024,1024]{2,1,0}) tuple(%index, %stack)
}

%micro (arg.1: (s32[], bf16[20,1024,1024])) -> (s32[], bf16[20,1024,1024]) {
  %arg.1 = (s32[], bf16[20,1024,1024]{2,1,0}) parameter(0)
  ROOT %while.1 = (s32[], bf16[20,1024,1024]{2,1,0}) while(%arg.1), condition=%c, body=%layers, metadata={op_name="jit(train_step)/jvp(layers)/while"}, backend_config={"known_trip_count":{"n":"20"}}
}

ENTRY %main (p0: (s32[], bf16[20,1024,1024]), p1: f32[1024], p2: f32[20,1024], p3: s32[]) -> f32[20,1024] {
  %p0 = (s32[], bf16[20,1024,1024]{2,1,0}) parameter(0)
  %p1 = f32[1024]{0} parameter(1)
  %p2 = f32[20,1024]{1,0} parameter(2)
  %p3 = s32[] parameter(3)
  %start = (f32[1024]{0}, f32[8192]{0}) all-gather-start(%p1), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}, use_global_device_ids=true
  %updated.1 = f32[20,1024]{1,0} fusion(%p2, %p1, %p3), kind=kLoop, calls=%update_fused
  %done = f32[8192]{0} all-gather-done(%start)
  %while.2 = (s32[], bf16[20,1024,1024]{2,1,0}) while(%p0), condition=%c2, body=%micro, backend_config={"known_trip_count":{"n":"4"}}
  ROOT %copy.1 = f32[20,1024]{1,0} copy(%updated.1)
}
"""  # noqa: E501
ENTRY = parse(TEXT)


def test_places_know_what_they_compute_and_how_often():
    assert [(place.label, place.times, launches(place)) for place in walk(ENTRY)] == [
        ("step", 1, 2 + 4 * 20 * 2),
        ("step > micro-batches ×4", 4, 20 * 2),
        ("step > micro-batches ×4 > layers forward ×20", 80, 2),
    ]


def test_a_loop_over_micro_batches_whose_count_xla_does_not_know_is_counted_by_its_name():
    known = 'backend_config={"known_trip_count":{"n":"4"}}'
    assert known in TEXT
    named = TEXT.replace(known, 'metadata={op_name="jit(train_step)/accumulation/shard_map/micro_batches_7/while"}')
    assert [place.times for place in walk(parse(named))] == [1, 7, 7 * 20]


def test_a_collective_knows_its_bytes_and_what_runs_meanwhile():
    (gather,) = collectives(ENTRY)
    assert (gather.kind, gather.bytes, gather.groups) == ("all-gather", 4 * 8192, (tuple(range(8)),))
    assert [instruction.name for instruction in gather.between] == ["updated.1"]


def test_times_are_those_worked_by_hand():
    prediction = predict(ENTRY, H200)
    memory, launch = H200.bandwidth * ASSUMPTIONS.memory, ASSUMPTIONS.launch
    product = max(2 * 1024**3 / (H200.peak * ASSUMPTIONS.matmul), 3 * 2**21 / memory, launch)
    weights = max((4 + 2 * 2**21) / memory, launch)  # a slice of the stack, and not the whole, which would take 9 µs
    network = ASSUMPTIONS.latency + collective_seconds("all-gather", 4 * 8192 * 7 / 8, range(8), H200, LINKS)
    assert prediction.components == pytest.approx({
        "matmuls": 80 * product, "fusions": 80 * weights + launch, "copies": launch,
        "exposed all-gather": network - launch,
    })  # fmt: skip
    assert prediction.seconds == pytest.approx(sum(prediction.components.values()))
    (exposure,) = prediction.exposures
    assert (exposure.seconds, exposure.exposed) == pytest.approx((network, network - launch))
    assert [round(row["seconds"] / launch) for row in prediction.costliest] == [80, 1, 1]


def test_text_without_an_entry_is_an_error():
    with pytest.raises(ValueError, match="no entry"):
        parse("HloModule nothing")


ITEMS = {"bf16": 2, "f32": 4, "s32": 4, "pred": 1, "s8": 1}


@given(st.lists(st.sampled_from(sorted(ITEMS)), max_size=4), st.lists(st.integers(0, 9), max_size=3))
def test_bytes_of_a_shape(dtypes, sizes):
    layout = "{" + ",".join(map(str, reversed(range(len(sizes))))) + "}"
    shapes = [f"{dtype}[{','.join(map(str, sizes))}]{layout}" for dtype in dtypes]
    expected = sum(ITEMS[dtype] for dtype in dtypes) * math.prod(sizes)
    assert shape_bytes(f"({', '.join(shapes)}, token[])") == expected


@given(st.data())
def test_axes_are_found_in_each_notation_of_groups(data):
    names = ("data", "fsdp", "expert", "context")
    sizes = dict(zip(names, data.draw(st.lists(st.integers(1, 3), min_size=4, max_size=4)), strict=True))
    wide = [name for name in names if sizes[name] > 1]
    if not wide:
        return
    axes = tuple(name for name in names if name in data.draw(st.sets(st.sampled_from(wide), min_size=1)))
    inside, outside = ([names.index(name) for name in names if (name in axes) == there] for there in (True, False))
    ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    size = math.prod(sizes[name] for name in axes)
    groups = ids.transpose(outside + inside).reshape(-1, size)
    order = ",".join(map(str, outside + inside))
    dims = ",".join(str(sizes[name]) for name in names)
    texts = [
        "replica_groups={" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups) + "}",
        f"replica_groups=[{len(groups)},{size}]<=[{dims}]T({order})",
        "replica_groups=mesh[" + ",".join(f"'{name}'={sizes[name]}" for name in names) + "] {"
        + ",".join(f"'{name}'" for name in axes) + "}",
        f"replica_groups=mesh['outer'={len(groups)},'inner'={size}], device_ids=([{dims}]T({order})) {{'inner'}}",
    ]  # fmt: skip
    for text in texts:
        found = device_groups(Instruction("x", "", "all-reduce", (), f"%y), channel_id=3, {text}, use_global_ids=true"))
        assert {frozenset(group) for group in found} == {frozenset(group) for group in groups.tolist()}, text
        assert mesh_axes("all-reduce", found, sizes) == axes
    ring = [(int(group[i]), int(group[(i + 1) % size])) for group in groups for i in range(size)]
    pairs = "source_target_pairs={" + ",".join(f"{{{a},{b}}}" for a, b in ring) + "}"
    found = device_groups(Instruction("x", "", "collective-permute", (), f"%y), {pairs}"))
    assert found == tuple(ring)
    if len(axes) == 1:
        assert mesh_axes("collective-permute", found, sizes) == axes


def test_groups_that_are_no_product_of_axes_have_none():
    assert mesh_axes("all-reduce", ((0, 3), (1, 2)), {"fsdp": 2, "expert": 2}) == ()
    assert mesh_axes("all-reduce", ((0, 1), (2, 3)), {"context": 4}) == ()
    assert mesh_axes("all-reduce", (), {"context": 4}) == ()


@pytest.mark.parametrize(
    ("kernel", "operands", "result", "flops"),
    [
        # 8 query heads, 2 heads of keys: twice 2 · 4096² · 8 · 128 for scores and values, over the causal half.
        ("attention", "bf16[1,4096,8,128] bf16[1,4096,2,128]", "bf16[1,4096,8,128]", 2 * 4096**2 * 8 * 128),
        ("attention_backward_keys", "bf16[1,4096,8,128] bf16[1,4096,2,128]", "f32[1,4096,2,128]",
         4 * 4096**2 * 8 * 128),
        ("attention", "bf16[1,512,8,128] bf16[1,4096,2,128]", "bf16[1,512,8,128]", 2 * 512 * 4096 * 8 * 128),
        ("attention_decode", "bf16[8,1,8,128] bf16[8,4096,2,128]", "f32[8,1,8,128]", 4 * 8 * 4096 * 8 * 128),
        ("attention_join", "f32[64,128] f32[64]", "bf16[8,128]", 0),
        ("grouped_product", "bf16[512,256] bf16[16,256,128]", "bf16[512,128]", 2 * 512 * 256 * 128),
        ("grouped_swiglu_backward", "bf16[512,128] bf16[16,256,128] bf16[512,512]", "bf16[512,512]",
         2 * 512 * 256 * 128),
        ("gram", "bf16[8,256,512]", "f32[8,256,256]", 8 * 256 * 256 * 512),
        ("residual_norm_forward", "f32[8,256]", "f32[8,256]", 0),
    ],
)  # fmt: skip
def test_operations_of_kernels_are_those_of_their_shapes(kernel, operands, result, flops):
    shapes = [array for text in (*operands.split(), result) for array in arrays(text)]
    assert _kernel_flops(kernel, shapes) == flops


TWO_GATHERS = """\
HloModule jit_train_step, is_scheduled=true

ENTRY %main (p0: f32[1048576], p1: f32[1048576]) -> f32[8388608] {
  %p0 = f32[1048576]{0} parameter(0)
  %p1 = f32[1048576]{0} parameter(1)
  %start.1 = (f32[1048576]{0}, f32[8388608]{0}) all-gather-start(%p0), replica_groups=[1,8]<=[8], dimensions={0}
  %start.2 = (f32[1048576]{0}, f32[8388608]{0}) all-gather-start(%p1), replica_groups=[1,8]<=[8], dimensions={0}
  %copy.1 = f32[1048576]{0} copy(%p0)
  %done.1 = f32[8388608]{0} all-gather-done(%start.1)
  %done.2 = f32[8388608]{0} all-gather-done(%start.2)
}
"""


def test_two_collectives_share_the_network_and_hide_behind_work_once():
    prediction = predict(parse(TWO_GATHERS), H200)
    first, second = prediction.exposures
    copy = prediction.components["copies"]
    assert first.seconds == second.seconds > copy
    assert (first.exposed, second.exposed) == pytest.approx((first.seconds - copy, second.seconds))
    assert prediction.seconds == pytest.approx(2 * first.seconds)


KERNEL = """\
  %x = bf16[32768,2048]{1,0} parameter(2)
  %w = bf16[3,2,2048,4096]{3,2,1,0} parameter(3)
  %call = bf16[32768,4096]{1,0} custom-call(%x, %w), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(train_step)/grouped_product/pallas_call"}
"""


def test_padded_rows_of_the_experts_cost_nothing():
    text = TWO_GATHERS.replace("  %copy.1", f"{KERNEL}  %copy.1")
    place = parse(text)
    call = next(x for x in place.instructions if x.name == "call")
    full, eighth = instruction_work(place, call), instruction_work(place, call, Shares(rows=1 / 8))
    weights = 2 * 2 * 2048 * 4096
    assert (full.flops, full.bytes) == (2 * 32768 * 2048 * 4096, weights + 2 * 32768 * (2048 + 4096))
    assert (eighth.flops, eighth.bytes) == (full.flops / 8, weights + (full.bytes - weights) / 8)


@pytest.mark.parametrize(("rows", "read"), [(1, 1 / 2), (3, 7 / 8), (32768, 1)])
def test_experts_without_tokens_are_not_read(rows, read):
    place = parse(TWO_GATHERS.replace("  %copy.1", f"{KERNEL.replace('32768', str(rows))}  %copy.1"))
    call = next(x for x in place.instructions if x.name == "call")
    assert instruction_work(place, call).bytes == read * 2 * 2 * 2048 * 4096 + 2 * rows * (2048 + 4096)


KEPT = """\
  %space = bf16[3,32768,4096]{2,1,0} custom-call(), custom_call_target="AllocateBuffer"
  %w = bf16[3,2,2048,4096]{3,2,1,0} parameter(2)
  %x = bf16[32768,2048]{1,0} parameter(3)
  %call = (bf16[32768,2048]{1,0}, bf16[3,32768,4096]{2,1,0}) custom-call(%x, %w, %space), \
custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(train_step)/grouped_swiglu/pallas_call"}
"""


def test_a_kernel_that_writes_a_layer_of_a_stack_moves_that_layer_once():
    place = parse(TWO_GATHERS.replace("  %copy.1", f"{KEPT}  %copy.1"))
    space, call = (next(x for x in place.instructions if x.name == name) for name in ("space", "call"))
    assert instruction_work(place, space) is None  # memory alone
    assert instruction_work(place, call).bytes == 2 * (2 * 2048 * 4096 + 32768 * (2048 + 2048 + 4096))
    assert instruction_work(place, call).flops == 2 * 32768 * 2048 * 4096


NORM = """\
  %outputs = bf16[3,4096,2048]{2,1,0} parameter(2)
  %stream = f32[4096,2048]{1,0} parameter(3)
  %layer = s32[1]{0} parameter(4)
  %call = (bf16[4096,2048]{1,0}, f32[4096,2048]{1,0}, f32[256,4,2048]{2,1,0}) custom-call(%outputs, %stream, %layer), \
custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(train_step)/residual_norm_backward/pallas_call"}
"""


def test_a_kernel_that_reads_a_layer_of_a_stack_moves_that_layer_once():
    place = parse(TWO_GATHERS.replace("  %copy.1", f"{NORM}  %copy.1"))
    call = next(x for x in place.instructions if x.name == "call")
    assert instruction_work(place, call).bytes == (2 * 2 + 2 * 4) * 4096 * 2048 + 4 * 256 * 4 * 2048 + 4


@pytest.mark.parametrize(("dtype", "peak"), [("bf16", 989e12), ("f32", 494.7e12)])
def test_matmuls_in_fp32_have_a_peak_of_their_own(dtype, peak):
    text = TEXT.replace("(bf16[1024,1024]{1,0}, s8", f"({dtype}[8192,8192]{{1,0}}, s8")
    text = text.replace("%weights = bf16[1024,1024]", f"%weights = {dtype}[8192,8192]")
    components = predict(parse(text), H200).components
    name = "matmuls in fp32" if dtype == "f32" else "matmuls"
    assert components[name] == pytest.approx(80 * 2 * 8192**3 / (peak * ASSUMPTIONS.matmul))


def test_fusions_that_only_move_compute_nothing():
    slice_of_weights = predict(ENTRY, H200).costliest[0]
    assert slice_of_weights["what"] == "fusion jvp(layers)/dynamic_slice"
    assert (slice_of_weights["bytes"], slice_of_weights["times"]) == (4 + 2 * 2**21, 80)
    assert slice_of_weights["moves"]
    negated = TEXT.replace("bitcast(%slice.1)", "negate(%slice.1)")
    assert not predict(parse(negated), H200).costliest[0]["moves"]
    copied = TEXT.replace("fusion(%stack, %index), kind=kLoop, calls=%slice_fused", "copy(%stack)")
    whole = predict(parse(copied), H200).costliest[0]
    assert (whole["bytes"], whole["moves"]) == (2 * 2 * 20 * 1024**2, True)


@pytest.mark.parametrize(("dtype", "fp32"), [("bf16", False), ("f32", True), ("f64", True)])
def test_kernels_in_fp32_have_its_peak(dtype, fp32):
    text = TWO_GATHERS.replace("  %copy.1", f"{KERNEL.replace('bf16', dtype)}  %copy.1")
    place = parse(text)
    (call,) = (x for x in place.instructions if x.name == "call")
    assert instruction_work(place, call).fp32 == fp32


def test_windows_and_experts_share_what_kernels_compute():
    config = load_config("configs/zaya1_74b.yaml").model  # every second layer has a window of 4,097
    shares = phase_shares(config, 1 << 17, {"expert": 8})
    windowed = (4097 * 4098 / 2 + ((1 << 17) - 4097) * 4097) / (1 << 17)
    assert shares.keys == pytest.approx((1 + windowed / ((1 << 17) + 1) * 2) / 2)
    assert shares.rows == 1 / 8
    assert phase_shares(config, 4096, {"expert": 1}) == (1, 1)


@pytest.mark.parametrize(
    ("status", "output", "reason"),
    [
        (1, "a\nValueError: no\nb", "ValueError: no"),
        (-9, "ValueError: No AMD GPUs", "SIGKILL ended the compiler: ValueError: No AMD GPUs"),
        (
            -6,
            "Some Error\nhipMalloc is a stand-in: it only compiles\n",
            "SIGABRT ended the compiler: hipMalloc is a stand-in",
        ),
        (1, "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: 8 > 4", "RESOURCE_EXHAUSTED: 8 > 4"),
        (-11, "", "SIGSEGV ended the compiler: it printed nothing"),
    ],
)
def test_a_compiler_that_fails_says_why(status, output, reason):
    assert reason in failure_reason(status, output)
