import sys

import numpy as np
import pytest

from tests.train_helpers import MODEL
from zaya_jax.bench.peer import peer_step
from zaya_jax.errors import InputError


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_peer_is_told_with_the_command_that_installs_it(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match=r"needs PyTorch and transformers: pip install -e '\.\[parity\]'\."):
        peer_step(MODEL, "float32", np.zeros((1, 4), np.int32), "cpu", 1)
