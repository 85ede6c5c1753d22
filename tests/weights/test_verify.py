"""The fixture of the released 8B, tried on what is not the 8B; the weights themselves are not here."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import random_model, random_values, tiny_config
from tests.hf.test_legacy import RELEASED_8B
from zaya_jax.checkpoint.__main__ import main as checkpoint
from zaya_jax.config import load_config
from zaya_jax.config.shipped import shipped
from zaya_jax.errors import InputError
from zaya_jax.hf.exporter import read_arrays, write_folder
from zaya_jax.model.arithmetic import total_parameters
from zaya_jax.model.zaya import logits
from zaya_jax.weights import verify as module
from zaya_jax.weights.verify import LIKELIEST, PROMPT, check_released, compare, verify_hf


def test_the_architecture_is_the_8bs():
    assert load_config(shipped("zaya1_8b.yaml")).model == RELEASED_8B
    assert total_parameters(RELEASED_8B) == 8_840_488_784
    assert len(PROMPT) == len(LIKELIEST) == 11


def test_another_model_is_refused_by_the_key_that_differs(tmp_path):
    values = jax.device_get(random_values(tiny_config()))
    write_folder(tmp_path / "model", tiny_config(), read_arrays(values), "bfloat16")
    for source in (tmp_path / "model", f"hf:{tmp_path / 'model'}"):
        with pytest.raises(InputError, match=r"is not ZAYA1-8B, .*: vocab_size is 37, but 262272 in the 8B"):
            verify_hf(source)
    check_released(dataclasses.replace(RELEASED_8B, layer_pattern=("full",) * 40, max_positions=32_768), "X")
    with pytest.raises(InputError, match=r"rope_base is 1000000\.0"):  # ZAYA1-base
        check_released(dataclasses.replace(RELEASED_8B, rope_base=1e6), "X")


def test_what_comes_out_is_compared_and_told(monkeypatch):
    """On a small model whose vocabulary the prompt is folded into, its own answer taken for the expected one."""
    model = random_model(tiny_config())
    monkeypatch.setattr(module, "PROMPT", tuple(token % 37 for token in PROMPT))
    out = np.asarray(logits(model, jnp.asarray([module.PROMPT]))[0])
    lines, good = compare(model)
    assert not good
    assert any(line.endswith("differs") for line in lines)
    assert lines[-1] == "The logits differ from the released 8B."
    likeliest = tuple(out.argmax(-1).tolist())
    monkeypatch.setattr(module, "LIKELIEST", likeliest)
    monkeypatch.setattr(module, "TAIL", out[-3:, -3:] + 0.05)
    lines, good = compare(model)
    assert good
    assert lines[-2:] == [
        "logits: max abs diff 0.0500 (at most 0.1 is allowed)",
        "OK: the logits match the released 8B.",
    ]
    assert len(lines) == 14
    monkeypatch.setattr(module, "LIKELIEST", (*likeliest[:-1], likeliest[-1] + 1))
    assert not compare(model)[1]
    monkeypatch.setattr(module, "LIKELIEST", likeliest)
    monkeypatch.setattr(module, "TAIL", out[-3:, -3:] + 0.2)
    assert not compare(model)[1]


@pytest.mark.parametrize(("good", "status"), [(True, 0), (False, 1)])
def test_the_exit_status_says_whether_the_logits_match(good, status, monkeypatch, capsys):
    monkeypatch.setattr(module, "verify_hf", lambda _: (["the report"], good))  # the 8B is too large for a test
    assert checkpoint(["verify-hf", "models/ZAYA1-8B"]) == status
    assert capsys.readouterr().out == "the report\n"
