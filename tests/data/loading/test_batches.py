import dataclasses
import hashlib
import itertools
import json
import pickle
import subprocess
import sys
import threading

import chex
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from tests.config_helpers import changed, row_ranges
from tests.data_helpers import heldout_batches, run_config, write_source
from zaya_jax.config import BatchConfig, PhaseConfig, SourceConfig, Table
from zaya_jax.config.stages import first_step, phase_steps, rows_before, stage_at, total_steps
from zaya_jax.data.loading.batches import _part_bytes, heldout_text, train_batches
from zaya_jax.data.loading.packed_rows import DocumentPart
from zaya_jax.data.loading.run_plan import plan_run
from zaya_jax.data.loading.sources import open_sources
from zaya_jax.data.prepare.shards import Text
from zaya_jax.data.tokenizer import EOT_TEXT, Tokenizer, train_tokenizer
from zaya_jax.errors import InputError


@pytest.fixture(scope="module")
def stream(tiny):
    with train_batches(*tiny) as batches:
        return list(batches)


def test_a_run_has_its_steps_and_several_epochs(tiny, stream):
    config, prepared = tiny
    assert len(stream) == total_steps(config)
    for batch in stream:
        chex.assert_shape([*batch.values()], (4, 16))
        chex.assert_type([batch[name] for name in ("tokens", "targets", "segment_ids", "positions")], np.int32)
        chex.assert_type(batch["loss_mask"], bool)
    train = prepared.sources["corpus"].manifest.train
    per_epoch = -(-(train.tokens - 1) // 16)
    assert 1.5 * per_epoch < 4 * len(stream)  # so that the stream crosses the end of an epoch
    rows = np.concatenate([batch["loss_mask"] for batch in stream])[:per_epoch]
    assert rows.sum() == train.tokens - train.documents


# Prepared data of earlier versions must give the same rows: a run that resumes would repeat or skip text otherwise.
FIRST_ROWS = "f1edba9a7fc5e8643950780c"


def test_rows_of_a_source_are_those_of_earlier_versions(stream):
    digest = hashlib.blake2b(digest_size=12)
    for batch in stream:
        for name in ("tokens", "targets", "segment_ids"):
            digest.update(batch[name].astype("<i4").tobytes())
        digest.update(batch["loss_mask"].tobytes())
    assert digest.hexdigest() == FIRST_ROWS


def with_batch(config, sequences):
    """`config` with as many sequences a step."""
    batch = BatchConfig(tokens=sequences * config.data.context)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, batch=batch))


def test_a_larger_batch_goes_on_where_the_smaller_one_stopped_but_not_within_a_step(tiny, stream):
    config, prepared = tiny
    with train_batches(with_batch(config, 8), prepared) as batches:
        state = batches.get_state()
        order = [phase.order for phase in batches.plan.phases]
        batches.set_state({"sequences": 16, "order": order})
        assert np.array_equal(next(batches)["tokens"], np.concatenate([stream[i]["tokens"] for i in (4, 5)]))
        with pytest.raises(InputError, match=r"^The saved position, after 12 rows, is not a whole number of steps"):
            batches.set_state({"sequences": 12, "order": order})
        assert batches.get_state() == {**state, "sequences": 24, "order": order}
        assert np.array_equal(next(batches)["tokens"], np.concatenate([stream[i]["tokens"] for i in (6, 7)]))


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
        thread.join(timeout=60)  # Grain tells its threads to stop and does not wait
    assert not [thread for thread in started if thread.is_alive()]


CHANGED = (
    r"a source or the corpus, a key of data or of a phase that has started, model\.vocab_size, seed, or the version"
)


@pytest.mark.parametrize("change", ["seed", "context"])
def test_a_state_is_the_rows_read_and_their_order_and_one_of_other_data_is_refused(tiny, change):
    config, prepared = tiny
    with train_batches(config, prepared) as batches:
        assert batches.get_state() == {"sequences": 0, "order": []}
        next(batches)
        state = batches.get_state()
        assert state == {"sequences": 4, "order": [batches.plan.phases[0].order]}
    if change == "seed":
        config = dataclasses.replace(config, seed=1)
    else:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, context=8))
    with train_batches(config, prepared) as batches, pytest.raises(InputError, match=CHANGED):
        batches.set_state(state)


def test_a_fresh_process_goes_on_and_ends_without_noise(tiny, stream):
    with train_batches(*tiny) as batches:
        for _ in range(5):
            next(batches)
        state = batches.get_state()
    code = """
import pickle, sys, zaya_jax.data.loading.batches as pipeline
from zaya_jax.data.loading.sources import open_sources
config, state = pickle.loads(sys.stdin.buffer.read())
batches = pipeline.train_batches(config, open_sources(config))
batches.set_state(state)
sys.stdout.buffer.write(next(batches)["tokens"].tobytes())
"""
    data = pickle.dumps((tiny[0], state))
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], input=data, capture_output=True, check=True)
    assert result.stdout == stream[5]["tokens"].tobytes()
    assert result.stderr == b""  # no thread or iterator complains, though nothing was closed


def test_heldout_is_given_once_in_order_and_filled_up(tiny):
    config, prepared = tiny
    config = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, batch_size=4))
    batches = list(heldout_batches(config, prepared, "corpus"))
    chex.assert_shape([array for batch in batches for array in batch.values()], (4, 16))
    documents, manifest = prepared.open("corpus", "heldout", PhaseConfig(tokens=1), 16)
    text = np.concatenate([documents[i].tokens for i in range(len(documents))])
    targets = np.concatenate([batch["targets"].ravel() for batch in batches])
    mask = np.concatenate([batch["loss_mask"].ravel() for batch in batches])
    assert np.array_equal(targets[: len(text) - 1], text[1:])
    assert mask.sum() == manifest.heldout.tokens - manifest.heldout.documents
    assert not mask[len(text) - 1 :].any()
    rows = -(-(len(text) - 1) // 16)
    assert rows % 4, "the corpus of this test must leave rows to fill"
    assert not np.concatenate([batch["segment_ids"] for batch in batches])[rows:].any()
    assert len(batches) == -(-rows // 4)


@pytest.mark.parametrize("limit", [1, 2, None])
@pytest.mark.parametrize("phase", [{}, {"packing": "bins", "over_length": "trim"}])
def test_the_text_of_heldout_batches_is_counted(tiny, phase, limit):
    config, prepared = tiny
    config = dataclasses.replace(config, phases=(PhaseConfig(tokens=320, **phase),))
    entry, eot = prepared.sources["corpus"].manifest.heldout, prepared.tokenizer.eot
    text = heldout_text(config, prepared, "corpus", limit)
    assert (text.use.documents, text.all_bytes) == (entry.documents, entry.text_bytes)
    batches = list(heldout_batches(config, prepared, "corpus", limit))
    targets = np.concatenate([batch["targets"][batch["loss_mask"]] for batch in batches])
    assert text.text_bytes == len(prepared.tokenizer.decode(targets[targets != eot].tolist()).encode())
    assert (text.use.used == entry.documents) == (text.text_bytes == text.all_bytes) == (limit is None)


@pytest.fixture(scope="module")
def kinds_of_tokenizers():
    words = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=False))
    words.pre_tokenizer, words.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    words.train_from_iterator(["ab äb", "b ä"], tokenizers.trainers.BpeTrainer(special_tokens=[EOT_TEXT]))
    return Tokenizer(words, bos_text=EOT_TEXT), train_tokenizer(["ab äb"], 258)


@given(text=st.text("abä ", min_size=1), cuts=st.sets(st.integers(1, 60)))
def test_the_bytes_of_parts_of_a_document_add_up_to_its_text(kinds_of_tokenizers, text, cuts):
    for tokenizer in kinds_of_tokenizers:
        tokens = np.array([tokenizer.eot, *tokenizer.encode(text), tokenizer.eot])
        edges = [0, *sorted(cut for cut in cuts if cut < len(tokens) - 1), len(tokens) - 1]
        parts = [DocumentPart(0, start, stop + 1) for start, stop in itertools.pairwise(edges)]
        sizes = [_part_bytes(tokenizer, Text(tokens, None), part) for part in parts]
        assert sum(sizes) == len(tokenizer.decode(tokens[1:-1].tolist()).encode())


def test_the_first_token_of_a_document_is_not_counted_if_it_is_text(kinds_of_tokenizers):
    plain = Tokenizer(kinds_of_tokenizers[0]._backend)  # its documents begin with no token
    tokens = np.array([*plain.encode("ab b"), plain.eot])
    assert plain.decode(tokens[:1].tolist()) == "ab"
    assert _part_bytes(plain, Text(tokens, None), DocumentPart(0, 0, len(tokens))) == len(" b")


def test_heldout_text_is_cut_into_windows_of_the_phases_context_whatever_the_training_does(tiny):
    config, prepared = tiny
    drop = PhaseConfig(tokens=320, over_length="drop")
    other = dataclasses.replace(config, phases=(dataclasses.replace(drop, name="long", context=40), drop))
    expected = list(heldout_batches(config, prepared, "corpus"))
    chex.assert_trees_all_equal(list(heldout_batches(other, prepared, "corpus")), expected)
    long = list(heldout_batches(other, prepared, "corpus", phase=0))
    assert {batch["tokens"].shape[1] for batch in long} == {40}
    tokens = [sum(batch["loss_mask"].sum() for batch in batches) for batches in (long, expected)]
    assert tokens[0] == tokens[1]


def test_heldout_bins_hold_every_document_whole(tiny):
    config, prepared = tiny
    bins = PhaseConfig(tokens=240, packing="bins", over_length="trim")
    data = dataclasses.replace(config.data, context=60)
    other = dataclasses.replace(config, data=data, phases=(bins,))
    batches = list(heldout_batches(other, prepared, "corpus"))
    entry = prepared.sources["corpus"].manifest.heldout
    mask = np.concatenate([batch["loss_mask"] for batch in batches])
    assert mask.shape[0] % 3 == 0
    # What is longer than a row is split, never left out.
    assert mask.sum() == entry.tokens - entry.documents


@pytest.mark.parametrize("limit", [0, 1, 2, 10**6])
def test_heldout_can_be_limited(tiny, limit):
    every = list(heldout_batches(*tiny, "corpus"))
    limited = list(heldout_batches(*tiny, "corpus", limit))
    assert len(limited) == min(limit, len(every))
    spread = [every[index * len(every) // len(limited)] for index in range(len(limited))]  # from all over the split
    chex.assert_trees_all_equal(limited, spread)


# --- several phases, whose batches differ ----------------------------------------------------------------------

BATCHES = [
    {"tokens": 64}, {"tokens": 128}, {"tokens": 256, "start": 64, "ramp_tokens": 400},
    {"tokens": 64, "stepped": [{"until": 100, "tokens": 192}, {"until": 500, "tokens": 128}]},
]  # fmt: skip
contexts = st.sampled_from([8, 16])  # of every batch 4 sequences and more
settings = st.fixed_dictionaries(
    {"tokens": st.integers(1, 600), "context": contexts, "batch": st.sampled_from(BATCHES),
     "packing": st.sampled_from(["windows", "bins"]), "over_length": st.sampled_from(["split", "trim"]),
     "mixture": st.sampled_from([{}, {"a": 1}, {"a": 2, "b": 1}])}
)  # fmt: skip


@pytest.fixture(scope="module")
def two_sources(tmp_path_factory):
    """A folder with the sources a and b, whose tokens tell them and their places apart."""
    folder = tmp_path_factory.mktemp("two")
    for name, first in (("a", 1), ("b", 150)):
        lengths = [3, 40, 9, 17, 25, 6, 31]
        documents = [
            [first + (7 * number + place) % 149 for place in range(size)] for number, size in enumerate(lengths)
        ]
        write_source(folder / name, documents, [[1, 2, 3]])
    return folder


def two_source_run(folder, phases, **keys):
    """A run of such phases, and what `open_sources` makes of it."""
    config = run_config(folder, ["a", "b"], phases)
    config = dataclasses.replace(config, **keys)
    config.check()
    return config, open_sources(config)


def together(config, prepared, count, steps, state=None):
    """Batches of some steps by `count` processes, put together; the state after them."""
    hosts = [train_batches(config, prepared, shares=[(index, count)] * len(config.phases)) for index in range(count)]
    stream = []
    for host in hosts:
        if state is not None:
            host.set_state(state)
    for _ in range(steps):
        shares = [next(host) for host in hosts]
        stream.append({name: np.concatenate([share[name] for share in shares]) for name in shares[0]})
    states = [json.loads(json.dumps(host.get_state())) for host in hosts]
    for host in hosts:
        host.close()
    assert all(state == states[0] for state in states)
    return stream, states[0]


def skipping(config, ranges):
    """`config` with these rows skipped."""
    return changed(config, {"data.skip_rows": ranges})


def is_skipped(config, row):
    return any(first <= row < end for first, end in config.data.skip_rows)


@given(phases=st.lists(settings, min_size=1, max_size=3), ranges=row_ranges(), before=st.sampled_from([1, 2, 4]),
       after=st.sampled_from([1, 2, 4]), stop=st.floats(0, 1), first=st.integers(0, 2))  # fmt: skip
def test_phases_of_any_batches_are_the_same_on_any_processes_after_any_interruption(
    two_sources, phases, ranges, before, after, stop, first
):
    start = None if first == 0 else f"phase{min(first, len(phases)) - 1}"
    config, prepared = two_source_run(two_sources, phases, start_phase=start)
    config = skipping(config, ranges)
    begin, end = first_step(config), total_steps(config)
    with train_batches(config, prepared) as batches:
        assert batches.get_state()["sequences"] == rows_before(config, begin)
        stream = list(batches)
        rows = [batches.plan[row] for row in range(rows_before(config, begin), len(batches.plan))
                if not is_skipped(config, row)]  # fmt: skip
    assert len(stream) == end - begin
    for step, batch in zip(range(begin, end), stream, strict=True):
        stage = stage_at(config, step)
        assert batch["tokens"].shape == (stage.sequences, stage.context)
    flat = [{name: batch[name][row] for name in batch} for batch in stream for row in range(len(batch["tokens"]))]
    chex.assert_trees_all_equal(flat, rows)

    cut = round(stop * len(stream))
    begun, state = together(config, prepared, before, cut)
    rest, last = together(config, prepared, after, len(stream) - cut, state)
    chex.assert_trees_all_equal([*begun, *rest], stream)
    assert last["sequences"] == rows_before(config, end)
    with train_batches(config, prepared) as batches:
        batches.set_state(last)
        assert not list(batches)


@given(phases=st.lists(settings, min_size=1, max_size=3), ranges=row_ranges())
def test_a_run_that_skips_rows_reads_the_others_of_a_run_whose_phases_have_all_of_them(two_sources, phases, ranges):
    config, prepared = two_source_run(two_sources, phases)
    kept = itertools.filterfalse(lambda row: is_skipped(skipping(config, ranges), row), itertools.count())
    expected, first, longer = [], 0, []
    for phase, (begin, end) in zip(phases, phase_steps(config), strict=True):
        rows = list(itertools.islice(kept, rows_before(config, end) - rows_before(config, begin)))
        expected += rows
        size = phase["context"]  # of a step of one row
        longer.append({**phase, "tokens": (rows[-1] + 1 - first) * size, "batch": {"tokens": size}})
        first = rows[-1] + 1
    with train_batches(two_source_run(two_sources, longer)[0], prepared) as batches:
        all_rows = [{name: array[0] for name, array in batch.items()} for batch in batches]
    with train_batches(skipping(config, ranges), prepared) as batches:
        read = [{name: batch[name][row] for name in batch} for batch in batches for row in range(len(batch["tokens"]))]
    chex.assert_trees_all_equal(read, [all_rows[row] for row in expected])


@given(stop=st.integers(0, 15), ranges=row_ranges(), later=row_ranges())
def test_a_range_that_is_added_after_the_position_gives_what_it_gives_from_the_start(two_sources, stop, ranges, later):
    config, prepared = two_source_run(two_sources, PHASES)
    unread = rows_before(skipping(config, ranges), stop)
    before = tuple(ends for ends in ranges if ends[0] < unread)
    unskipped = skipping(config, (*before, *(ends for ends in later if ends[0] >= unread)))
    with train_batches(skipping(config, ranges), prepared) as batches:
        read = [next(batches) for _ in range(stop)]
        state = json.loads(json.dumps(batches.get_state()))
    assert state["sequences"] == unread
    with train_batches(unskipped, prepared) as batches:
        batches.set_state(state)
        read += batches
    with train_batches(unskipped, prepared) as batches:
        chex.assert_trees_all_equal(read, list(batches))


def test_skipped_rows_count_as_read_and_those_after_the_run_as_nothing(two_sources):
    config, prepared = two_source_run(two_sources, [{"tokens": 64, "mixture": {"a": 1}}])
    plan = plan_run(config, prepared)
    share = plan.phases[0].shares["a"]
    more = plan_run(skipping(config, ((1, 1 + share.phase_rows.later.rows.per_epoch),)), prepared).phases[0]
    assert more.rows - plan.phases[0].rows == share.phase_rows.later.rows.per_epoch
    assert more.shares["a"].epochs == pytest.approx(share.epochs + 1)
    once = changed(config, {"data.sources": Table({name: SourceConfig(str(two_sources / name), 1.0) for name in "ab"})})
    prepared = open_sources(once)
    plan_run(skipping(once, ((len(plan), 10**9),)), prepared)
    with pytest.raises(InputError, match=r"the source a would be read .* times, but data\.sources\.a\.max_epochs is 1"):
        plan_run(skipping(once, ((1, 10**9),)), prepared)


PHASES = [{"tokens": 640, "mixture": {"a": 2, "b": 1}}, {"tokens": 512, "batch": {"tokens": 64}}, {"tokens": 256}]


def changed_phases(index, **changes):
    return [{**phase, **changes} if index == place else phase for place, phase in enumerate(PHASES)]


@pytest.mark.parametrize("changes", [
    {"context": 8}, {"mixture": {"b": 1}}, {"packing": "bins"}, {"tokens": 1280}, {"batch": {"tokens": 256}},
], ids=str)  # fmt: skip
def test_a_phase_to_come_may_change_and_one_that_is_begun_may_not(two_sources, changes):
    config, prepared = two_source_run(two_sources, PHASES)
    with train_batches(config, prepared) as batches:
        stream, states = [], [batches.get_state()]
        for batch in batches:
            stream.append(batch)
            states.append(batches.get_state())
    assert [len(state["order"]) for state in states] == [0, *[1] * 5, *[2] * 8, *[3] * 2]
    other, _ = two_source_run(two_sources, changed_phases(1, **changes))
    with train_batches(other, prepared) as batches:
        for step in (0, 3, 5):  # the last of these is the end of the first phase
            batches.set_state(states[step])
            if step < 5:
                chex.assert_trees_all_equal([next(batches) for _ in range(5 - step)], stream[step:5])
            assert batches.get_state() == states[5]
        positions = {"tokens": (14, 15), "batch": (7,)}.get(next(iter(changes)), range(6, 16))
        for step in positions:  # rows are the same of another budget or batch, until it moves a phase or splits a step
            with pytest.raises(InputError, match=r"^The saved position(,| belongs to) "):
                batches.set_state(states[step])
        assert batches.get_state() == states[5], "what is refused changes nothing"


def test_a_past_budget_that_moves_the_phase_is_refused(two_sources):
    config, prepared = two_source_run(two_sources, PHASES)
    with train_batches(config, prepared) as batches:
        for _ in range(8):
            next(batches)
        state = batches.get_state()
    other, _ = two_source_run(two_sources, changed_phases(0, tokens=768))
    assert rows_before(other, 7) == state["sequences"], "at this row a step of the same phase begins in both"
    with train_batches(other, prepared) as batches, pytest.raises(InputError, match=CHANGED):
        batches.set_state(state)
