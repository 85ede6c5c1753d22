import numpy as np

from zaya_jax.bench import packing as bench
from zaya_jax.data.bins import pack


def test_what_is_said_of_a_plan_is_so(capsys):
    found = bench.measure_planning(3000, 2)
    assert list(found) == ["4096", "32768", "131072"]
    sizes = np.clip(np.random.default_rng(0).lognormal(np.log(900), 1.2, 3000), 1, 4096).astype(np.int64)
    bins = pack(sizes, 4096)
    assert found["4096"]["bins"] == len(bins)
    assert abs(found["4096"]["padding"] - (1 - sizes.sum() / (4096 * len(bins)))) < 1e-6
    for one in found.values():
        assert len(one["seconds"]) == 2
        assert 10**7 < one["peak_bytes"] < 10**9
    assert "planning 3,000 documents at 131,072: " in capsys.readouterr().out
