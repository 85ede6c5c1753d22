from zaya_jax.bench.balance import EVEN, _cost, _median, _prepare, _steps, even_after
from zaya_jax.bench.sweep import Curve
from zaya_jax.data.prepare import open_manifest


def test_the_load_is_even_where_it_stays_so():
    low, high = EVEN - 0.01, EVEN
    assert even_after([low, high, low, high, high, high, low]) == 4
    assert even_after([high] * 3) == 1
    assert even_after([low, high, high]) is None
    assert even_after([]) is None


def test_steps_are_counted_from_the_start_and_from_the_switch():
    low, high = 0.5, 0.99
    found = _steps(Curve([], [low, high, high, high, low, low, high, high, high, high], 0.0), 5)
    assert found == (2, 2)
    assert _cost(found, 5) == 4
    assert _cost(_steps(Curve([], [low] * 10, 0.0), 5), 5) == 12


def test_never_is_more_than_any_number():
    assert _median([3, None, 5]) == 5
    assert _median([None, None, 5]) is None
    assert _median([4, 1, 2]) == 2


def test_the_two_sources_share_a_tokenizer(tmp_path):
    folders = _prepare(tmp_path)
    manifests = [open_manifest(folder) for folder in folders.values()]
    assert len({manifest.tokenizer.digest for manifest in manifests}) == 1
    assert all(manifest.train.tokens > 200_000 and manifest.heldout.documents for manifest in manifests)
