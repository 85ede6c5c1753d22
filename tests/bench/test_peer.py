import sys
from types import SimpleNamespace

import numpy as np
import pytest

from tests.train_helpers import CONFIG, MODEL, change
from zaya_jax.bench import peer
from zaya_jax.bench.peer import check_peer, peer_step, time_peer
from zaya_jax.errors import InputError


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_peer_is_told_with_the_command_that_installs_it(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match=r"needs PyTorch and transformers: pip install -e '\.\[parity\]'\."):
        peer_step(MODEL, "float32", np.zeros((1, 4), np.int32), "cpu", 1)
    with pytest.raises(InputError, match=r"needs PyTorch and transformers"):
        check_peer()


class Device:
    """A device, a model and an optimizer in one: what fits it, and how long a pass takes."""

    def __init__(self, monkeypatch, fits, seconds):
        self.fits, self.seconds, self.again, self.moved, self.now, self.left = fits, seconds, None, False, 0.0, True
        monkeypatch.setattr(peer, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def fastest(self):
        torch, tokens = SimpleNamespace(OutOfMemoryError=MemoryError), np.zeros((8, 4))
        return peer._fastest(torch, self, tokens, self.one_pass, self.move, lambda: None)

    def one_pass(self, rows, of):
        if not self.fits(self.again, len(rows), self.moved):
            raise MemoryError
        assert of == len(rows)
        self.now += self.seconds(self.again, len(rows))

    def move(self):
        self.moved = True

    def activation_checkpointing_enable(self):
        self.again = True

    def activation_checkpointing_disable(self):
        self.again = False

    def zero_grad(self, set_to_none):
        self.left = not set_to_none


def test_training_takes_the_fastest_pass_that_fits_beside_the_moments(monkeypatch):
    def seconds(again, rows):
        return (1 + rows) * (1.3 if again else 1)

    roomy = Device(monkeypatch, lambda *_: True, seconds)
    assert roomy.fastest() == (False, 8)
    assert not roomy.left
    assert Device(monkeypatch, lambda again, rows, moved: again or rows < 2, seconds).fastest() == (True, 8)
    assert Device(monkeypatch, lambda again, rows, moved: rows < (8 if again else 4), seconds).fastest() == (False, 2)


@pytest.mark.parametrize("fits", [lambda again, rows, moved: False, lambda again, rows, moved: not moved])
def test_a_model_that_does_not_fit_is_told_in_a_sentence(monkeypatch, fits):
    with pytest.raises(InputError, match="do not fit the memory of this device"):
        Device(monkeypatch, fits, lambda *_: 1.0).fastest()


@pytest.mark.parity
def test_the_peer_trains_on_all_rows_whatever_it_takes_at_a_time(monkeypatch):
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, (8, 32))
    still = change(CONFIG, {"optimizer.adamw.learning_rate": 1e-12})
    whole = peer_step(MODEL, "float32", tokens, "cpu", 1)()
    for rows, again in ((2, True), (8, False)):
        monkeypatch.setattr(peer, "_fastest", lambda *_, chosen=(again, rows): chosen)
        found = time_peer(still, tokens, "cpu", 1, 2)
        assert found["losses"] == pytest.approx([whole] * 3, abs=2e-4)
        assert len(found["seconds"]["step"]) == 2
        assert (found["micro_batch"], found["checkpointing"], found["peak_bytes"]) == (rows, again, None)
    losses = time_peer(CONFIG, tokens, "cpu", 1, 2)["losses"]
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parity
def test_the_peer_trains_in_bf16_with_the_setting_that_it_chooses():
    config = change(CONFIG, {"train.compute_dtype": "bfloat16"})
    found = time_peer(config, np.random.default_rng(0).integers(0, MODEL.vocab_size, (4, 32)), "cpu", 1, 1)
    assert found["micro_batch"] in (1, 2, 4)
    assert found["losses"][1] < found["losses"][0]
