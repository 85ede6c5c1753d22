import contextlib
import dataclasses
import hashlib
import json
import pickle
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from orbax.checkpoint import v1 as ocp

from zaya_jax.config import PhaseConfig
from zaya_jax.data.pipeline import heldout_batches, heldout_bytes, train_batches
from zaya_jax.errors import InputError


def same(first, second):
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def stream(tiny):
    with train_batches(*tiny) as batches:
        return list(batches)


def test_a_run_has_its_steps_and_several_epochs(tiny, stream):
    config, prepared = tiny
    assert len(stream) == config.train.steps
    for batch in stream:
        assert {name: (array.shape, array.dtype.name) for name, array in batch.items()} == {
            "tokens": ((4, 16), "int32"),
            "targets": ((4, 16), "int32"),
            "segment_ids": ((4, 16), "int32"),
            "positions": ((4, 16), "int32"),
            "loss_mask": ((4, 16), "bool"),
        }
    train = prepared.sources["corpus"].manifest.train
    per_epoch = -(-(train.tokens - 1) // 16)
    assert 1.5 * per_epoch < 4 * len(stream)  # so that the other tests cross the end of an epoch
    rows = np.concatenate([batch["loss_mask"] for batch in stream])[:per_epoch]
    assert rows.sum() == train.tokens - train.documents


# A digest of `tokens`, `targets`, `segment_ids` and `loss_mask`, taken before sources and phases were there.
FIRST_ROWS = "bc7efb80a0446be81e627b97"


def test_the_rows_of_one_source_and_phase_are_those_of_earlier_versions(stream):
    digest = hashlib.blake2b(digest_size=12)
    for batch in stream:
        for name in ("tokens", "targets", "segment_ids"):
            digest.update(batch[name].astype("<i4").tobytes())
        digest.update(batch["loss_mask"].tobytes())
    assert digest.hexdigest() == FIRST_ROWS


@given(step=st.integers(0, 40), ahead=st.integers(0, 3))
def test_a_run_resumes_at_any_step(tiny, stream, step, ahead):
    with train_batches(*tiny) as first:
        for _ in range(step):
            next(first)
        state = json.loads(json.dumps(first.get_state()))
    with train_batches(*tiny) as second:
        for _ in range(ahead):
            next(second)
        second.set_state(state)
        assert second.get_state() == state
        rest = list(second)
    assert len(rest) == len(stream) - step
    assert all(map(same, rest, stream[step:]))


@given(before=st.sampled_from([1, 2, 4]), after=st.sampled_from([1, 2, 4]), step=st.integers(0, 38))
def test_any_number_of_processes_gives_and_resumes_the_same_run(tiny, stream, before, after, step):
    config, prepared = tiny
    state = None
    for count, steps in ((before, range(step)), (after, range(step, step + 2))):
        processes = [train_batches(config, prepared, process_index=i, process_count=count) for i in range(count)]
        if state is not None:
            for process in processes:
                process.set_state(state)
        for i in steps:
            shares = [next(process) for process in processes]
            batch = {name: np.concatenate([share[name] for share in shares]) for name in shares[0]}
            assert same(batch, stream[i])
        (state,) = {json.dumps(process.get_state()): process.get_state() for process in processes}.values()
        for process in processes:
            process.close()


def test_a_larger_batch_goes_on_where_the_smaller_one_stopped(tiny, stream):
    config, prepared = tiny
    larger = dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch=8))
    with train_batches(larger, prepared) as batches:
        batches.set_state({**batches.get_state(), "sequences": 12})
        assert np.array_equal(next(batches)["tokens"], np.concatenate([stream[i]["tokens"] for i in (3, 4)]))


def test_closing_stops_the_threads(tiny):
    before = set(threading.enumerate())
    batches = train_batches(*tiny)
    next(batches)
    batches.set_state(batches.get_state())
    next(batches)
    started = set(threading.enumerate()) - before
    assert started
    batches.close()
    for thread in started:
        thread.join(timeout=5)  # Grain tells its threads to stop and does not wait
    assert not [thread for thread in started if thread.is_alive()]


@pytest.mark.parametrize("change", ["seed", "context"])
def test_a_state_of_other_data_is_refused(tiny, change):
    config, prepared = tiny
    with train_batches(config, prepared) as batches:
        state = batches.get_state()
    if change == "seed":
        config = dataclasses.replace(config, seed=1)
    else:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, context=8))
    with train_batches(config, prepared) as batches, pytest.raises(InputError, match=r"seed or .* has changed since"):
        batches.set_state(state)


def test_the_state_is_the_rows_given_and_a_digest_of_what_orders_them(tiny):
    with train_batches(*tiny) as batches:
        first = batches.get_state()
        next(batches)
        assert batches.get_state() == {"sequences": 4, "order": batches.plan.order}
    assert first == {"sequences": 0, "order": batches.plan.order}


def test_rows_must_divide_among_the_processes(tiny):
    with pytest.raises(InputError, match=r"train\.global_batch is 4, but must be a multiple of the 3 processes"):
        train_batches(*tiny, process_index=0, process_count=3)


def saved(folder, batches, step):
    """Save with Orbax after `step` batches, going on while the save is in flight."""
    for _ in range(step):
        next(batches)
    with ocp.training.Checkpointer(folder) as checkpointer:
        checkpointer.save_checkpointables_async(step, {"state": {"x": jnp.arange(4.0)}, "data": batches})
        next(batches)


def load(folder, batches, step):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = {"x": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding)}
    with ocp.training.Checkpointer(folder) as checkpointer:
        return checkpointer.load_checkpointables(step, {"state": abstract, "data": batches})


def test_orbax_saves_and_restores_on_another_number_of_processes(tiny, stream, tmp_path):
    config, prepared = tiny
    with train_batches(config, prepared) as batches:
        saved(tmp_path / "run", batches, 7)
    with train_batches(config, prepared, process_index=1, process_count=2) as batches:
        assert load(tmp_path / "run", batches, 7)["data"] is batches
        assert np.array_equal(next(batches)["tokens"], stream[7]["tokens"][2:])
    other = dataclasses.replace(config, seed=1)
    with train_batches(other, prepared) as batches:
        load(tmp_path / "run", batches, 7)
        with pytest.raises(InputError, match="The saved position is in other data"):
            next(batches)
        batches.set_state(batches.get_state())
        next(batches)


def test_a_fresh_process_goes_on_and_ends_without_noise(tiny, stream, tmp_path):
    with train_batches(*tiny) as batches:
        saved(tmp_path / "run", batches, 5)
    code = """
import asyncio, pickle, sys, zaya_jax.data.pipeline as pipeline, pathlib
from zaya_jax.data.sources import open_sources
config, folder = pickle.loads(sys.stdin.buffer.read())
batches = pipeline.train_batches(config, open_sources(config))
async def load(): await (await batches.load(pathlib.Path(folder)))
asyncio.run(load())
sys.stdout.buffer.write(next(batches)["tokens"].tobytes())
"""
    data = pickle.dumps((tiny[0], tmp_path / "run" / "5" / "data"))
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], input=data, capture_output=True, check=True)
    assert result.stdout == stream[5]["tokens"].tobytes()
    assert result.stderr == b""  # no thread or iterator complains, though nothing was closed


def test_heldout_is_given_once_in_order_and_filled_up(tiny):
    config, prepared = tiny
    batches = list(heldout_batches(config, prepared, "corpus"))
    assert {array.shape for batch in batches for array in batch.values()} == {(3, 16)}
    documents, manifest = prepared.open("corpus", "heldout", PhaseConfig(), 16)
    text = np.concatenate([documents[i].tokens for i in range(len(documents))])
    targets = np.concatenate([batch["targets"].ravel() for batch in batches])
    mask = np.concatenate([batch["loss_mask"].ravel() for batch in batches])
    assert np.array_equal(targets[: len(text) - 1], text[1:])
    assert mask.sum() == manifest.heldout.tokens - manifest.heldout.documents
    assert not mask[len(text) - 1 :].any()
    rows = -(-(len(text) - 1) // 16)
    assert rows % 3, "the corpus of this test must leave rows to fill"
    assert not np.concatenate([batch["segment_ids"] for batch in batches])[rows:].any()
    assert len(batches) == -(-rows // 3)


def test_heldout_text_is_counted_for_its_source(tiny):
    config, prepared = tiny
    entry = prepared.sources["corpus"].manifest.heldout
    assert heldout_bytes(config, prepared, "corpus") == (entry.documents, entry.text_bytes)
    assert entry.documents * entry.text_bytes > 0


def test_heldout_text_is_cut_into_windows_of_the_context_whatever_the_training_does(tiny):
    config, prepared = tiny
    drop = PhaseConfig(over_length="drop", context=40)
    other = dataclasses.replace(config, data=dataclasses.replace(config.data, phases=(drop,)))
    expected = list(heldout_batches(config, prepared, "corpus"))
    assert all(map(same, heldout_batches(other, prepared, "corpus"), expected))


def test_heldout_bins_hold_every_document_whole(tiny):
    config, prepared = tiny
    bins = PhaseConfig(packing="bins", over_length="trim")
    data = dataclasses.replace(config.data, phases=(bins,), context=60)
    batches = list(heldout_batches(dataclasses.replace(config, data=data), prepared, "corpus"))
    entry = prepared.sources["corpus"].manifest.heldout
    mask = np.concatenate([batch["loss_mask"] for batch in batches])
    assert mask.shape[0] % 3 == 0
    # What is longer than a row is split, never left out.
    assert mask.sum() == entry.tokens - entry.documents


@pytest.mark.parametrize("limit", [0, 1, 2, 10**6])
def test_heldout_can_be_limited(tiny, limit):
    every = list(heldout_batches(*tiny, "corpus"))
    some = list(heldout_batches(*tiny, "corpus", limit))
    assert len(some) == min(limit, len(every))
    assert all(map(same, some, every))


CHANGED = (
    r"a source or of the corpus, a key of data, model\.vocab_size, seed or .*train\.global_batch has changed since"
)


def test_a_message_names_what_may_have_changed(tiny):
    with train_batches(*tiny) as batches, pytest.raises(InputError, match=CHANGED):
        batches.set_state({"sequences": 0, "order": "other"})
    for phases in (1, 2):  # with one, a batch of another size goes on in the same rows
        parts = tuple(PhaseConfig(first_step=step) for step in range(phases))
        config = dataclasses.replace(tiny[0], data=dataclasses.replace(tiny[0].data, phases=parts))
        larger = dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch=8))
        with train_batches(config, tiny[1]) as batches, train_batches(larger, tiny[1]) as others:
            refusal = contextlib.nullcontext() if phases == 1 else pytest.raises(InputError, match=CHANGED)
            with refusal:
                others.set_state(batches.get_state())
