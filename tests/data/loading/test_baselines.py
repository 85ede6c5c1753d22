import shutil
import subprocess

import numpy as np
import pytest

from zaya_jax.data.loading import text_corpus
from zaya_jax.data.loading.text_corpus import compressor_baselines, last_window

NOISE = np.random.default_rng(0).integers(0, 256, 50_000, np.uint8).tobytes()


def test_noise_takes_eight_bits_a_byte_and_a_copy_of_it_none():
    bits = compressor_baselines(NOISE, NOISE)
    assert set(bits) == {"gzip", "xz", "gzip_given_train", "xz_given_train"}
    assert bits["gzip"] == pytest.approx(8, rel=0.01)
    assert bits["xz"] == pytest.approx(8, rel=0.01)
    assert bits["xz_given_train"] < 0.2
    assert bits["gzip_given_train"] == pytest.approx(8, rel=0.01)  # the copy is farther back than 32 KiB


@pytest.mark.parametrize("command", ["gzip", "xz"])
def test_the_figure_is_that_of_the_command(command):
    if shutil.which(command) is None:
        pytest.skip(f"{command} is not installed")
    text = b"".join(b"line %d\n" % (i * i) for i in range(5000))
    size = len(subprocess.run([command, "-9"], input=text, capture_output=True, check=True).stdout)
    # GNU gzip has a deflate of its own, and containers differ by a few bytes.
    assert compressor_baselines(b"", text)[command] == pytest.approx(8 * size / len(text), rel=0.01)


def test_the_end_of_the_texts_is_what_fits(monkeypatch):
    monkeypatch.setattr(text_corpus, "WINDOW_BYTES", 5)
    read = []
    texts = (read.append(text) or text for text in ["last", "☃b", "first"])
    assert last_window(texts) == b"blast"
    assert read == ["last", "☃b"]
    assert last_window(["b", "a"]) == b"ab"
