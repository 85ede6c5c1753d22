import dataclasses
import itertools
import shutil
from collections import Counter

import chex
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data_helpers import heldout_batches, run_config, write_source
from zaya_jax.config import Table
from zaya_jax.data.loading.batches import heldout_text, train_batches
from zaya_jax.data.loading.document_parts import Use
from zaya_jax.data.loading.run_plan import plan_run
from zaya_jax.data.loading.sources import open_sources
from zaya_jax.errors import InputError

# Tokens tell the source and the place: source k uses the ids k * 100 + 1 … k * 100 + 99.
NAMES = ["a", "b", "c"]


def documents_of(number, lengths):
    """Documents of a source, their tokens all different as far as 99 go round."""
    ids = itertools.cycle(range(number * 100 + 1, number * 100 + 100))
    return [[next(ids) for _ in range(length)] for length in lengths]


corpora = st.lists(st.lists(st.integers(2, 60), min_size=1, max_size=8), min_size=1, max_size=3)
weights = st.lists(st.sampled_from([0.1, 0.25, 0.3, 1.0, 2.0, 7.5]), min_size=3, max_size=3)
phase_settings = st.tuples(
    st.sampled_from(["windows", "bins"]), st.integers(2, 24), st.sampled_from(["split", "trim"]), weights
)


def make_run(folder, corpora, phases, **options):
    shutil.rmtree(folder, ignore_errors=True)
    names = NAMES[: len(corpora)]
    for number, lengths in enumerate(corpora):
        write_source(folder / names[number], documents_of(number, lengths), [[1, 2, 3]], shards=1 + number)
    tree = [
        {"first_step": 3 * index, "context": context, "packing": packing, "over_length": over_length,
         "mixture": dict(zip(names, phase_weights, strict=False))}
        for index, (packing, context, over_length, phase_weights) in enumerate(phases)
    ]  # fmt: skip
    config = run_config(folder, names, tree, **options)
    return config, open_sources(config)


@given(corpora=corpora, phases=st.lists(phase_settings, min_size=1, max_size=3), seed=st.integers(0, 9))
def test_no_source_repeats_a_token_before_it_has_given_all_others(tmp_path_factory, corpora, phases, seed):
    phases = [(packing, context, "split", phase_weights) for packing, context, _, phase_weights in phases]
    config, prepared = make_run(tmp_path_factory.getbasetemp() / "epochs", corpora, phases, seed=seed)
    seen = {name: Counter() for name in prepared.sources}
    plan = plan_run(config, prepared)
    for index in range(len(plan)):
        row = plan[index]
        (source,) = {int(token) // 100 for token in row["tokens"][row["segment_ids"] > 0]}
        pairs = zip(row["tokens"][row["loss_mask"]].tolist(), row["targets"][row["loss_mask"]].tolist(), strict=True)
        seen[NAMES[source]].update(pairs)
    for number, (name, lengths) in enumerate(zip(NAMES, corpora, strict=False)):
        everything = Counter(
            pair for document in documents_of(number, lengths) for pair in itertools.pairwise(document)
        )
        times = {pair: seen[name][pair] / count for pair, count in everything.items()}
        assert set(seen[name]) <= set(everything)
        if sum(lengths) < 99:  # every pair is there once, so that counts tell epochs
            assert max(times.values()) - min(times.values()) <= 1


@given(phases=st.lists(phase_settings, min_size=1, max_size=3))
def test_each_phase_is_mixed_as_its_weights_say(tmp_path_factory, phases):
    config, prepared = make_run(tmp_path_factory.getbasetemp() / "mixed", [[20], [30, 9], [4, 5]], phases, steps=15)
    plan = plan_run(config, prepared)
    assert len(plan) == 15 * 8
    assert [phase.first_row for phase in plan.phases] == [24 * index for index in range(len(phases))]
    for phase, (_, context, _, phase_weights) in zip(plan.phases, phases, strict=True):
        rows = Counter(int(plan[phase.first_row + i]["tokens"].max()) // 100 for i in range(phase.rows))
        for number, weight in enumerate(phase_weights):
            assert rows[number] == phase.shares[NAMES[number]].rows
            assert abs(rows[number] - phase.rows * weight / sum(phase_weights)) <= 1
        assert plan[phase.first_row]["tokens"].shape == (context,)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_worker_processes_change_nothing(tmp_path, workers):
    config, prepared = make_run(
        tmp_path, [[40, 7, 19], [8] * 9], [("windows", 12, "split", [1, 2, 1]), ("bins", 10, "split", [3, 1, 1])]
    )
    with train_batches(config, prepared) as batches:
        stream = list(batches)
    data = dataclasses.replace(config.data, workers=workers)
    with train_batches(dataclasses.replace(config, data=data), prepared) as batches:
        chex.assert_trees_all_equal([next(batches) for _ in range(3)], stream[:3])
        state = batches.get_state()
    with train_batches(config, prepared) as batches:
        batches.set_state(state)
        chex.assert_trees_all_equal(list(batches), stream[3:])


def test_without_weights_sources_are_mixed_by_their_tokens(tmp_path):
    write_source(tmp_path / "a", documents_of(0, [30]), [[1, 2]])
    write_source(tmp_path / "b", documents_of(1, [40, 50]), [[1, 2]])
    config = run_config(tmp_path, ["a", "b"], [{}], steps=5)
    plan = plan_run(config, open_sources(config))
    assert {name: share.rows for name, share in plan.phases[0].shares.items()} == {"a": 10, "b": 30}


@pytest.mark.parametrize(("limit", "steps", "fits"), [(1.0, 2, True), (1.0, 3, False), (1.6, 3, True), (0.4, 1, False)])
def test_a_source_is_not_read_more_often_than_it_may_be(tmp_path, limit, steps, fits):
    write_source(tmp_path / "a", documents_of(0, [17]), [[1, 2]])  # one row of 16
    config = run_config(tmp_path, ["a"], [{}], steps=steps, batch=1, context=8)
    source = dataclasses.replace(config.data.sources["a"], max_epochs=limit)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, sources=Table({"a": source})))
    prepared = open_sources(config)
    if fits:
        plan = plan_run(config, prepared)
        assert plan.phases[0].shares["a"].epochs == pytest.approx(steps / 2, abs=0.07)
    else:
        with pytest.raises(InputError, match=r"phases\.phase0 the source a would be read .*max_epochs is"):
            plan_run(config, prepared)


def orders(config):
    """Of each phase what its rows and their order depend on."""
    return [phase.order for phase in plan_run(config, open_sources(config)).phases]


def test_the_order_tells_phases_sources_and_seed_apart(tmp_path):
    write_source(tmp_path / "a", documents_of(0, [40]), [[1, 2]])
    write_source(tmp_path / "b", documents_of(1, [40]), [[1, 2]])
    phases = [{"mixture": {"a": 1}}, {"first_step": 4, "mixture": {"a": 1, "b": 1}}]
    configs = [
        run_config(tmp_path, ["a", "b"], phases),
        run_config(tmp_path, ["a", "b"], phases, seed=1),
        run_config(tmp_path, ["a", "b"], phases, batch=4),
        run_config(tmp_path, ["a", "b"], phases, context=8),
        run_config(tmp_path, ["a", "b"], [phases[0], {**phases[1], "first_step": 5}]),
        run_config(tmp_path, ["a", "b"], [phases[0], {**phases[1], "packing": "bins"}]),
        run_config(tmp_path, ["a", "b"], [phases[0], {**phases[1], "mixture": {"a": 1, "b": 2}}]),
        run_config(tmp_path, ["a", "b"], [phases[0], {**phases[1], "mixture": {"b": 1, "a": 1}}]),  # ties go to b
        run_config(tmp_path, ["a"], phases[:1]),
    ]
    assert len({tuple(orders(config)) for config in configs}) == len(configs)
    # Only the rows that lie before a phase are a part of its order, not what number of them makes a step.
    alone = run_config(tmp_path, ["a"], phases[:1], batch=4)
    assert orders(alone) == orders(configs[-1])
    finer = run_config(tmp_path, ["a", "b"], [phases[0], {**phases[1], "first_step": 8}], steps=16, batch=4)
    assert orders(finer) == orders(configs[0])


def test_a_template_is_known_by_what_it_writes(tmp_path):
    talk = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    write_source(tmp_path / "talk", [talk] * 4, [talk], kind="chat")
    digests = []
    for name, text in (("one", "A"), ("one", "BB"), ("two", "A")):
        body = "{% generation %}{{ messages[1].content }}{% endgeneration %}"
        (tmp_path / name).write_text(f"{{{{ messages[0].content }}}}{text}{body}")
        config = run_config(tmp_path, ["talk"], [{"template": str(tmp_path / name)}])
        digests.append(orders(config))
    assert digests[0] == digests[2] != digests[1]


def test_sources_of_one_shape_have_orders_of_their_own(tmp_path):
    for name in "ab":
        write_source(tmp_path / name, [[number + 1] * 9 for number in range(60)], [[1, 2]])
    config = run_config(tmp_path, ["a", "b"], [{"mixture": {"a": 1, "b": 1}}], steps=4, context=9)
    plan = plan_run(config, open_sources(config))
    tokens = [plan[index]["tokens"][-1] for index in range(32)]
    assert np.mean(np.equal(tokens[::2], tokens[1::2])) < 0.3


def test_each_source_is_held_out_by_itself(tmp_path):
    write_source(tmp_path / "a", documents_of(0, [40]), documents_of(0, [30, 8]))
    write_source(tmp_path / "b", documents_of(1, [40]), documents_of(1, [9]))
    write_source(tmp_path / "c", documents_of(2, [40]), [])
    phases = [{"mixture": {"a": 1, "c": 1}}, {"first_step": 1, "packing": "bins", "over_length": "drop",
                                              "mixture": {"a": 1, "c": 1}}]  # fmt: skip
    config = run_config(tmp_path, NAMES, phases)
    prepared = open_sources(config)
    (batch,) = heldout_batches(config, prepared, "a")
    pairs = sorted(zip(batch["tokens"][batch["loss_mask"]], batch["targets"][batch["loss_mask"]], strict=True))
    assert pairs == sorted(pair for document in documents_of(0, [30, 8]) for pair in itertools.pairwise(document))
    assert heldout_text(config, prepared, "a").use.documents == 2
    assert list(heldout_batches(config, prepared, "b")) == []  # no phase reads it
    assert heldout_text(config, prepared, "b") is None
    assert list(heldout_batches(config, prepared, "c")) == []
    text = heldout_text(config, prepared, "c")
    assert (text.use, text.text_bytes, text.all_bytes) == (Use(0, 0, 0, 0, 0, 0, 0.0), 0, 0)
