"""AITER's attention without an AMD GPU: all around it with an emulation of what jax-aiter documents.

Attention itself is checked on a GPU only: by the trial before a run, and by `make gpu-report`.
"""

import collections
import itertools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import seeds
from tests.ops.document_attention import attend, attend_backward, check_any_packed, check_packed
from tests.ops.test_attention_kernel import documents
from zaya_jax.ops import aiter
from zaya_jax.ops.registry import select_kernels
from zaya_jax.ops.selfcheck import EXAMPLE
from zaya_jax.ops.target import Target

MI300X = Target("rocm", "AMD Instinct MI300X", "gfx942")
BOTH = ("dropout_p softmax_scale is_causal wl wr how_v3_bf16_cvt max_seqlen_q max_seqlen_k zero_tensors use_asm_v3 "
        "cp_axis cp_size cp_load_balanced ")  # fmt: skip
FORWARD = collections.namedtuple("MhaFwdConfig", BOTH + "return_lse return_randval min_seqlen_q logits_soft_cap")
BACKWARD = collections.namedtuple("MhaBwdConfig", BOTH + "deterministic is_v3_atomic_fp32")


def over_documents(function, config, starts, outputs, *arrays):
    """Call `function` with the tokens of each document; tokens of none are not written (here NaN)."""
    assert (config.dropout_p, config.is_causal, config.wr, config.zero_tensors) == (0, True, -1, False)
    window = None if config.wl == -1 else config.wl + 1

    def run(starts, *arrays):
        results = [np.full(x.shape, np.nan, np.float32) for x in outputs]
        for start, end in itertools.pairwise(starts):
            assert end - start <= config.max_seqlen_q == config.max_seqlen_k
            inputs = [np.asarray(x, np.float32)[start:end] for x in arrays]
            for whole, part in zip(results, function(*inputs, window, config.softmax_scale), strict=True):
                whole[start:end] = part
        return [x.astype(like.dtype) for x, like in zip(results, outputs, strict=True)]

    return jax.pure_callback(run, outputs, starts, *arrays)


def mha_fwd(q, k, v, cu_sq, cu_skv, out_prov, bias, alibi, gen, config):
    assert cu_sq is cu_skv
    assert not any(x.size for x in (out_prov, bias, alibi, gen))
    assert config.return_lse
    stats = jax.ShapeDtypeStruct(q.shape[:2], jnp.float32)

    def of_document(*inputs):
        out, lse = attend(*inputs)
        return out, lse.T

    out, lse = over_documents(of_document, config, cu_sq, (jax.ShapeDtypeStruct(q.shape, q.dtype), stats), q, k, v)
    return out, lse.T, jnp.zeros(0, jnp.uint8), jnp.zeros(2, jnp.int32)


def mha_bwd(dout, q, k, v, out, lse, cu_sq, cu_sk, *absent, config):
    assert cu_sq is cu_sk
    assert (len(absent), sum(x.size for x in absent)) == (7, 0)
    assert config.deterministic
    assert not config.use_asm_v3, "it adds the gradient of queries in any order"
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]

    def of_document(q, k, v, out, lse, dout, *rest):
        return attend_backward(q, k, v, out, lse.T, dout, *rest)

    return *over_documents(of_document, config, cu_sq, like, q, k, v, out, lse.T, dout), None, None


def pinned(target=MI300X, dtype="bfloat16", name="aiter"):
    return select_kernels(target, EXAMPLE, dtype, None, {"attention": name})


def test_without_jax_aiter_it_is_refused_with_a_sentence():
    why = "AITER's attention needs jax-aiter, whose import raised ModuleNotFoundError: No module named 'jax_aiter'"
    with pytest.raises(ValueError, match=f"ops.attention=aiter cannot be used: {why}"):
        pinned()


@pytest.fixture(scope="module")
def installed():
    ours = {"MhaFwdConfig": FORWARD, "MhaBwdConfig": BACKWARD, "mha_fwd": mha_fwd, "mha_bwd": mha_bwd}
    modules = {name: types.ModuleType(name) for name in ("jax_aiter", "jax_aiter.mha", "jax_aiter.ops")}
    modules["jax_aiter.ops.mha"] = modules["jax_aiter.ops"].mha = types.SimpleNamespace(**ours)
    modules["jax_aiter"].ops = modules["jax_aiter.ops"]
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        aiter.unavailable.cache_clear()
        yield
    aiter.unavailable.cache_clear()


@settings(max_examples=10)
@given(data=st.data(), seed=seeds(), how=st.sampled_from([("aiter", None), ("aiter", 17), ("aiter_forward", 1)]))
def test_around_an_emulated_aiter_it_equals_the_reference(installed, data, seed, how):
    check_packed(*how, data.draw(documents(2, 48)), seed)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["aiter", "aiter_forward"])
@given(data=st.data(), seed=seeds())
def test_around_an_emulated_aiter_it_equals_the_reference_in_any_shape(installed, name, data, seed):
    check_any_packed(name, data, seed)


def test_it_is_a_candidate_where_jax_aiter_is_and_never_the_default(installed):
    assert [pinned(name=name).chosen["attention"] for name in ("aiter", "aiter_forward")] == ["aiter", "aiter_forward"]
    assert select_kernels(MI300X, EXAMPLE, "bfloat16").chosen["attention"] == "pallas"
    simulated, sentence = pinned().without_libraries()
    assert simulated.chosen["attention"] == "pallas"
    assert "pallas for aiter (attention)" in sentence
    with pytest.raises(ValueError, match="needs gfx942 or gfx950, not gfx90a"):
        pinned(Target("rocm", "AMD Instinct MI250X", "gfx90a"))
    with pytest.raises(ValueError, match="needs arrays in bfloat16, not float32"):
        pinned(dtype="float32")
    with pytest.raises(ValueError, match="H200 has no such kernel"):
        pinned(Target("cuda", "NVIDIA H200", "sm_90"))


def test_a_log_sum_exp_for_one_document_only_is_refused(installed, monkeypatch):
    def old(*arguments, config):
        out, lse, *rest = mha_fwd(*arguments, config=config)
        return out, lse[:, : config.max_seqlen_q], *rest

    monkeypatch.setattr(sys.modules["jax_aiter.ops.mha"], "mha_fwd", old)
    with pytest.raises(ValueError, match=r"of shape \(6, 48\), not \(6, 144\): it is too old"):
        check_packed("aiter", None, np.ones((3, 48), np.int32), 0)
