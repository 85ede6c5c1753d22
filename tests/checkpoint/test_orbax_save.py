import logging
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from zaya_jax.checkpoint.digest import PIECE
from zaya_jax.checkpoint.orbax_save import OrbaxSave, _hide_closed_loops, _in_chunks, _Quiet
from zaya_jax.checkpoint.reader import CheckpointReader
from zaya_jax.checkpoint.small_arrays import SMALL_ARRAYS
from zaya_jax.run.manifest import STATE

ARRAYS = {"large": jnp.arange(6000.0).reshape(2, 3000), SMALL_ARRAYS: np.arange(10, dtype=np.uint8)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "1"
    OrbaxSave(folder, ARRAYS).wait()
    return folder


def test_arrays_of_devices_and_of_the_host_are_read_back_bitwise(saved):
    reader = CheckpointReader(saved, {"small": {"dtype": "uint8", "shape": [3], "at": 4}})
    for name, x in ARRAYS.items():
        assert reader.read(name).tobytes() == np.asarray(x).tobytes()
    np.testing.assert_array_equal(reader.read("small"), [4, 5, 6])
    np.testing.assert_array_equal(reader.read("small", (slice(1, 2),)), [5])


def test_nothing_is_compressed(saved):
    store = {"driver": "ocdbt", "base": f"file://{saved / STATE}/"}
    large = tensorstore.open({"driver": "zarr3", "kvstore": {**store, "path": "large/"}}, open=True).result()
    assert "zstd" not in str(large.spec().to_json()["metadata"])


def test_arrays_over_a_piece_are_cut_along_their_first_axis():
    class Large:
        nbytes = PIECE + 1

    assert _in_chunks((), ARRAYS["large"]) is None
    options = _in_chunks((), Large())
    assert (options.chunk_byte_size, options.shard_axes) == (PIECE, (0,))


def test_a_thread_that_fails_after_the_end_of_a_save_prints_no_traceback(caplog):
    _Quiet().end()
    log = logging.getLogger("absl")
    log.error("[thread=%s] _SignalingThread.run() raised an exception: %s", "a", "no space")
    log.error("something else")
    assert [record.message for record in caplog.records] == ["something else"]


def test_an_operation_that_outlives_the_event_loop_of_its_save_prints_no_traceback(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(str(unraisable.exc_value)))
    _hide_closed_loops.__wrapped__()
    for text in ("Event loop is closed", "something else"):
        promise, future = tensorstore.Promise.new()
        future.add_done_callback(lambda _, text=text: exec(f"raise RuntimeError({text!r})"))  # noqa: S102
        promise.set_result(1)
    assert seen == ["something else"]
