"""Every kernel, compiled by XLA's compilers for NVIDIA and AMD GPUs: registers, spills, shared memory, launches."""

import functools
import itertools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attention_tiles import AttentionInputs
from pallas_kernels.class_sort import class_sort
from tests.kernel_helpers import kernels, shape, with_kernel
from tests.lab.compilers.test_compiled import need_stand_ins, run
from tests.ops import test_attention_kernel as attention
from tests.ops import test_cca_mix_kernel as cca_mix
from tests.ops import test_gram_polynomial as gram_polynomial
from tests.ops import test_residual_norm_kernel as residual_norm
from tests.train_helpers import ROOT
from zaya_jax.config import MuonConfig, OptimizerConfig, load_config
from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.lab.kernel_cases import EIGHT_B, cases, passes
from zaya_jax.lab.measure.tune import DECIDING, deciding_cases, with_choice
from zaya_jax.lab.predict.calibration import as_row, get_device
from zaya_jax.lab.predict.compilers.gpus import GPUS
from zaya_jax.lab.predict.compilers.kernels import Request, compile_cases, read_program
from zaya_jax.lab.predict.compilers.predict import instruction_work, launched
from zaya_jax.lab.predict.compilers.toolchain import compile_program
from zaya_jax.model.loss import chunk_tokens, chunked_loss
from zaya_jax.ops.kernel_table import Choice, own_table, sources_digest, tiles_of
from zaya_jax.ops.registry import OPERATIONS, select_kernels
from zaya_jax.optim.build import make_optimizer

pytestmark = pytest.mark.compilers
CASES = cases(EIGHT_B, "bfloat16")
NAMES = [name for name in CASES if f"{name} backward" not in CASES]  # a backward case includes its forward pass
RECORDED = json.loads((ROOT / "benchmarks" / "kernels_compiled.json").read_text(encoding="utf-8"))["gpus"]
SPILLS = {"h200": {"gram_polynomial": 12}}  # bytes of a thread, with either jax
FURTHER_SPILLS = {"h200": {**SPILLS["h200"], "grouped_outer": 196}}  # in fp32 at the 74B's sizes
BOTH = (jnp.bfloat16, jnp.float32)
WIDTH, VOCABULARY = 2048, 262_272  # of the 8B


@functools.cache
def compiled(gpu, dtype="bfloat16"):
    need_stand_ins(gpu)
    programs = compile_cases(gpu, Request((dtype,), ("kernels",), NAMES))
    return {name: program for (_, name, _), program in programs.items()}


def check(programs, gpu, allowed):
    """No kernel spills more than `allowed`, not even scalar registers, or shares more memory than the GPU has."""
    found = [kernel for program in programs.values() for kernel in program.kernels]
    spilling = [(name, kernel) for name, program in programs.items() for kernel in program.kernels
                if kernel.spills or kernel.scratch]  # fmt: skip
    wrong = [(name, kernel.name) for name, kernel in spilling if kernel.spills > allowed.get(kernel.name, -1)]
    assert wrong == []
    for kernel in found:
        assert 0 < kernel.registers <= (255 if GPUS[gpu].platform == "cuda" else 512), kernel
        assert kernel.shared <= GPUS[gpu].shared_per_block, kernel
        assert kernel.threads > 0, kernel
    return {kernel.name for kernel in found}


@pytest.mark.parametrize("gpu", ["mi300x", "h200"])
def test_kernels_fit_the_gpu(gpu):
    assert check(compiled(gpu), gpu, SPILLS.get(gpu, {})) == {kernel["name"] for kernel in RECORDED[gpu]["kernels"]}


@pytest.mark.parametrize("gpu", ["mi300x", "h200"])
def test_cases_launch_and_move_no_more_than_recorded(gpu):
    for row in RECORDED[gpu]["cases"]:
        if row["dtype"] == "bfloat16" and row["case"] in NAMES:
            program = compiled(gpu)[row["case"]]
            assert program.counted
            assert program.launches <= row["kernels"]["launches"], row
            assert program.bytes <= 1.01 * row["kernels"]["bytes"], row
            if row["case"] == "residual_norm backward":
                assert program.bytes <= 1.2 * row["least_bytes"]


@pytest.mark.parametrize("gpu", ["mi300x", "h200"])
def test_a_case_takes_the_time_of_its_table(gpu, tmp_path, monkeypatch):
    """On a device that was measured, and on one of which nothing else is known."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    entry = compiled(gpu)["experts backward"].entry
    works = [as_row(part, work) | {"times": place.times} for place, _, part, work in launched(entry)]
    size = {"dtype": "bfloat16", "rows": 1024, "widths": [], "implementation": "pallas", "tiles": {},
            "seconds": {"pallas": {"plain": 1.0}}, "works": works}  # fmt: skip
    rows = {"sources": sources_digest(*OPERATIONS["experts"].modules), "sizes": [size]}
    kind = HARDWARE[gpu].kinds[0]
    path = own_table(kind)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"device": kind, "operations": {"experts": rows}}))
    kernels = [work for *_, work in launched(entry) if work.kernel]
    assert {"class_sort", "grouped_swiglu", "grouped_outer"} <= {work.name for work in kernels}
    device = get_device(gpu, 1)
    for end in (device, device.slowest):
        assert sum(work.seconds(end) for work in kernels) == pytest.approx(1.0, rel=0.01)


def by_mosaic():
    return {"step": passes(CASES["attention backward"], with_kernel("h200", "attention", "mosaic"))}


def test_attention_by_mosaic_fits_the_gpu(tmp_path):
    done = run("h200", tmp_path, f"from {__name__} import *\ncompile_all(by_mosaic(), 'h200', {str(tmp_path)!r})")
    assert done.returncode == 0, done.stderr
    found = check({"step": read_program("step", "h200", tmp_path)}, "h200", {})
    assert found == {"attention_mosaic", "attention_mosaic_keys", "attention_mosaic_queries"}


def compile_vendor(gpu, folder):
    case = cases(EIGHT_B, "bfloat16")["grouped_matmul backward"]
    pinned = dict.fromkeys(("grouped_product", "grouped_product_transposed", "grouped_outer"), "hipblaslt")
    selection = select_kernels(GPUS[gpu].target, EIGHT_B.model, "bfloat16", pinned=pinned)
    compile_program("vendor", *passes(case, selection), gpu, Path(folder))
    d, f, e = EIGHT_B.width, 2 * EIGHT_B.expert_width, EIGHT_B.experts
    rows = [shape(EIGHT_B.tokens, width, dtype=jnp.bfloat16) for width in (d, f)]
    others = shape(e, dtype=jnp.int32), shape(3, e, d, f, dtype=jnp.float32)

    def add(x, y, sizes, total):
        return selection.implementation("grouped_outer")(x, y, sizes, total_lepq=total, layer=1)

    compile_program("vendor_sum", add, (*rows, *others), gpu, Path(folder), (3,))


def test_xla_compiles_the_vendor_s_product_to_the_vendor_s_kernel(tmp_path):
    need_stand_ins("mi300x")
    done = run("mi300x", tmp_path, f"from {__name__} import *\ncompile_vendor('mi300x', {str(tmp_path)!r})")
    assert done.returncode == 0, done.stderr
    for name, count in {"vendor": 3, "vendor_sum": 1}.items():
        text = (tmp_path / f"{name}.hlo").read_text()
        assert text.count('custom_call_target="__cublas$lt$groupedMatmul"') == count
        assert not re.search(r"= \S+ (ragged-)?dot\(|custom_call_target=\"__cublas\$lt\$matmul", text)


def compile_optimizer(gpu, folder):
    for form in ("sum", "ema"):
        optimizer = make_optimizer(OptimizerConfig(muon=MuonConfig(momentum_form=form)), {"w": "expert"}, {})
        params, number = {"w": shape(4, 256, 512, dtype=jnp.float32)}, shape(dtype=jnp.float32)

        def step(params, state, grads, factor, skip, optimizer=optimizer):
            ops = kernels(gpu).ops
            updates, state = optimizer.update(grads, state, params, factor=factor, skip=skip > 0, ops=ops)
            return jax.tree.map(lambda p, u: jnp.where(skip > 0, p, p + u), params, updates), state

        arguments = params, jax.eval_shape(optimizer.init, params), params, number, number
        compile_program(form, step, arguments, gpu, Path(folder), (0, 1))


def test_an_optimizer_step_moves_what_it_must(tmp_path):
    """Clipping, skipping and the norm add no pass. Counts bytes per element, without the Newton–Schulz iterations."""
    done = run("h200", tmp_path, f"from {__name__} import *\ncompile_optimizer('h200', {str(tmp_path)!r})")
    assert done.returncode == 0, done.stderr
    for form in ("sum", "ema"):
        entry = read_program(form, "h200", tmp_path).entry
        moved = sum(work.bytes for place, _, _, work in launched(entry) if place is entry)
        momentum, update = 4 + 4 + 4 + 2, 2 + 4 + 4
        assert momentum + update <= moved / (4 * 256 * 512) < 1.01 * (momentum + update)


def compile_head(gpu, folder):
    def gradient(hidden, head, targets, weights):
        return jax.value_and_grad(chunked_loss, (0, 1), has_aux=True)(hidden, head, None, targets, weights)

    hidden, head = shape(8192, WIDTH, dtype=jnp.bfloat16), shape(VOCABULARY, WIDTH, dtype=jnp.float32)
    targets, weights = shape(8192, dtype=jnp.int32), shape(8192, dtype=jnp.float32)
    compile_program("head", gradient, (hidden, head, targets, weights), gpu, Path(folder))


@pytest.mark.parametrize("gpu", ["mi300x", "h200"])
def test_the_head_reads_its_logits_once_besides_the_matmuls(gpu, tmp_path):
    """For each logit, 4 bytes are read and 2 written."""
    done = run(gpu, tmp_path, f"from {__name__} import *\ncompile_head({gpu!r}, {str(tmp_path)!r})")
    assert done.returncode == 0, done.stderr
    program = read_program("head", gpu, tmp_path)
    (chunks,) = program.entry.loops()
    work = [instruction_work(chunks, x) for x in chunks.instructions]
    moved = sum(x.bytes for x in work if x is not None and x.component != "matmuls")
    assert 6 < moved / (chunk_tokens(8192, VOCABULARY, WIDTH, False) * VOCABULARY) < 6.2


def further(gpu):
    """Programs by name: the 74B's sizes, other widths, dtypes, windows, and arrays with 64-bit or odd addresses."""
    made, model = {}, load_config(ROOT / "configs" / "zaya1_74b.yaml").model
    d, e, f = model.hidden_size, model.num_experts, model.expert_size
    large = EIGHT_B._replace(tokens=e * EIGHT_B.per_expert, width=d, query_heads=model.num_query_heads, experts=e,
                             expert_width=f, matrices=(e, d, 2 * f), kv_heads=model.num_kv_heads)  # fmt: skip
    for dtype in BOTH:
        kind = jnp.dtype(dtype).name
        selection, every = select_kernels(GPUS[gpu].target, large.model, kind), deciding_cases(large, kind)
        for name in (name for name in every if f"{name} backward" not in every):
            made[f"large_{kind}_{name}".replace(" ", "_")] = passes(every[name], selection)
        for c, window in ((64, None), (64, 1024), (128, model.sliding_window)):
            gradient = functools.partial(attention.gradient, platform=gpu, window=window)
            made[f"attention_{kind}_{c}_{window}"] = gradient, attention.arguments(dtype, c=c)
        for width in (96, 1536, 4096, 8192):
            for scaled in (True, False):
                gradient = functools.partial(residual_norm.gradient, platform=gpu)
                made[f"norm_{kind}_{width}_{scaled}"] = gradient, residual_norm.shapes(4096, width, dtype, scaled)
        for sizes in ((16, 256, 17), gram_polynomial.ALL_EXPERTS):
            polynomial = functools.partial(gram_polynomial.polynomial, platform=gpu)
            made[f"gram_{kind}_{sizes[-1]}"] = polynomial, (shape(*sizes, dtype=dtype),)
        for c in (64, 256):
            sizes = EIGHT_B._replace(channels=c)
            selection = select_kernels(GPUS[gpu].target, sizes.model, kind)
            made[f"step_{kind}_{c}"] = passes(cases(sizes, kind)["cca_mix of a decode"], selection)
        for name in cca_mix.LAUNCHES:
            mix = functools.partial(cca_mix.trained, platform=gpu, implementation=name)
            made[f"mix_{kind}_{name}"] = mix, cca_mix.shapes(dtype, c=64, pairs=16)
    if GPUS[gpu].architecture == "sm_90":  # with an output in fp32, as in ring attention
        for c, window in ((64, None), (128, 1024)):
            arguments = *attention.arguments(jnp.bfloat16, c=c)[:5], shape(1, 4096, 8, c, dtype=jnp.bfloat16)
            made[f"attention_mosaic_{c}"] = functools.partial(mosaic_part, gpu, window), arguments
    for classes in (24, 63):
        sort = functools.partial(class_sort, classes=classes, dtype=jnp.bfloat16, architecture=GPUS[gpu].architecture)
        made[f"sort_{classes}"] = sort, (shape(16384, dtype=jnp.int32),)
    return made


def mosaic_part(gpu, window, *arrays):
    x = AttentionInputs(*arrays[:5], window=window)
    part, gradient = (with_kernel(gpu, name, "mosaic").implementation(name)
                      for name in ("partial_attention", "partial_attention_gradient"))  # fmt: skip
    whole = part(x)
    return whole, gradient(x, whole, arrays[5])


def compile_all(programs, gpu, folder):
    for name, (function, arguments) in programs.items():
        compile_program(name, function, arguments, gpu, Path(folder))


@pytest.mark.soak
@pytest.mark.parametrize("gpu", ["mi300x", "mi355x", "h200"])
def test_further_kernels_fit_the_gpu(gpu, tmp_path):
    done = run(gpu, tmp_path, f"from {__name__} import *\ncompile_all(further({gpu!r}), {gpu!r}, {str(tmp_path)!r})")
    assert done.returncode == 0, done.stderr
    names = check({name: read_program(name, gpu, tmp_path) for name in further(gpu)}, gpu, FURTHER_SPILLS.get(gpu, {}))
    assert {"attention", "residual_norm_backward", "gram_polynomial", "cca_mix_backward_rows"} <= names


def timed(gpu):
    """The programs that `machine kernels --tune` times on a GPU, by name."""
    target, made = GPUS[gpu].target, {}
    selection, every = select_kernels(target, EIGHT_B.model, "bfloat16"), deciding_cases(EIGHT_B, "bfloat16")
    for name, deciding in DECIDING.items():
        for case, kernel in itertools.product(deciding, OPERATIONS[name].kernels_for(target.platform)):
            for part, tiles in tiles_of(kernel, target, "bfloat16").items():
                for number, tile in enumerate(tiles[1:]):
                    choice = Choice(1, kernel.name, ((part, tile),), "bfloat16")
                    title = f"{case}_{kernel.name}_{part}_{number}".replace(" ", "_")
                    made[title] = passes(every[case], with_choice(selection, name, choice))
    return made


@pytest.mark.soak
@pytest.mark.parametrize("gpu", ["mi300x", "h200"])
def test_every_tile_that_is_timed_fits_the_gpu(gpu, tmp_path):
    done = run(gpu, tmp_path, f"from {__name__} import *\ncompile_all(timed({gpu!r}), {gpu!r}, {str(tmp_path)!r})")
    assert done.returncode == 0, done.stderr
    check({name: read_program(name, gpu, tmp_path) for name in timed(gpu)}, gpu, SPILLS.get(gpu, {}))


@pytest.mark.soak
@pytest.mark.parametrize(("gpu", "dtype"), [("mi355x", "bfloat16"), *((gpu, "float32") for gpu in RECORDED)])
def test_kernels_fit_in_fp32_and_on_other_gpus(gpu, dtype):
    check(compiled(gpu, dtype), gpu, {})
