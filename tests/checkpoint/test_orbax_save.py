import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from zaya_jax.checkpoint.bundle import BUNDLE
from zaya_jax.checkpoint.digest import PIECE
from zaya_jax.checkpoint.manifest import STATE
from zaya_jax.checkpoint.orbax_save import OrbaxSave, _in_chunks
from zaya_jax.checkpoint.reader import CheckpointReader

ARRAYS = {"large": jnp.arange(6000.0).reshape(2, 3000), "small": jnp.ones(3, jnp.bfloat16), "n": jnp.int32(7)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "1"
    saving = OrbaxSave(folder, ARRAYS)
    saving.wait()
    return folder, saving.leaves


def test_arrays_are_read_back_bitwise(saved):
    reader = CheckpointReader(*saved)
    for name, x in ARRAYS.items():
        assert reader.read(name).tobytes() == np.asarray(x).tobytes()
    np.testing.assert_array_equal(reader.read("small", (slice(1, 2),)), np.ones(1))


def test_leaves_say_what_the_arrays_are_and_where_the_small_ones_lie(saved):
    _, leaves = saved
    assert leaves == {"large": {"dtype": "float32", "shape": [2, 3000]},
                      "small": {"dtype": "bfloat16", "shape": [3], "at": 0},
                      "n": {"dtype": "int32", "shape": [], "at": 6}}  # fmt: skip


def test_small_arrays_are_one_and_nothing_is_compressed(saved):
    store = {"driver": "ocdbt", "base": f"file://{saved[0] / STATE}/"}
    names = {key.decode().partition("/")[0] for key in tensorstore.KvStore.open(store).result().list().result()}
    assert names >= {"large", BUNDLE}
    assert not names & {"small", "n"}
    large = tensorstore.open({"driver": "zarr3", "kvstore": {**store, "path": "large/"}}, open=True).result()
    assert "zstd" not in str(large.spec().to_json()["metadata"])


def test_arrays_over_a_piece_are_cut_along_their_first_axis():
    class Large:
        nbytes = PIECE + 1

    assert _in_chunks((), ARRAYS["large"]) is None
    options = _in_chunks((), Large())
    assert (options.chunk_byte_size, options.shard_axes) == (PIECE, (0,))
