import subprocess
import sys
import time

import numpy as np
import pytest

from zaya_jax.bench.memory import peak_memory

SIZE = 2**27


def hold():
    held = np.ones(SIZE, np.uint8)
    time.sleep(0.3)
    return held[0]


def test_the_peak_counts_what_was_let_go_of_again():
    idle = peak_memory(lambda: None)
    assert peak_memory(hold) - idle == pytest.approx(SIZE, rel=0.2)


def test_the_peak_counts_the_processes_below():
    code = f"import time; held = bytearray(b'x') * {SIZE}; time.sleep(0.5)"
    idle = peak_memory(lambda: None)
    assert peak_memory(lambda: subprocess.run([sys.executable, "-c", code], check=True)) - idle > 0.9 * SIZE


def test_what_the_work_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        peak_memory(lambda: 1 // 0)
