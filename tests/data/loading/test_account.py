"""What a run reads equals what it uses plus what it leaves out."""

import json
import random
import shutil

import pytest
import tokenizers

from tests.config_helpers import changed
from tests.data_helpers import heldout_batches, run_config, small_tokenizer, write_source
from zaya_jax.data.describe import describe
from zaya_jax.data.loading.account import account, account_lines
from zaya_jax.data.loading.run_plan import plan_run
from zaya_jax.data.loading.sources import open_sources
from zaya_jax.data.prepare.document_encoder import PrepareSettings
from zaya_jax.data.prepare.preparation import prepare, summary
from zaya_jax.data.tokenizer import EOT_TEXT, Tokenizer
from zaya_jax.errors import InputError

LETTERS = "abcde "  # all that a tokenizer without bytes knows
NAMES = ["a", "b", "c"]
GOOD = {"tokens": '{"text": "abc"}',
        "chat": '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'}  # fmt: skip


def letters_tokenizer(unknown):
    """A tokenizer that drops what it does not know, or replaces it by `unknown`."""
    names = [EOT_TEXT, *([unknown] if unknown else [])]
    model = tokenizers.models.BPE({text: place for place, text in enumerate([*names, *LETTERS])}, [], unk_token=unknown)
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens(names)
    return Tokenizer(backend)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """Files of tokenizers: of bytes, and two of letters."""
    folder = tmp_path_factory.mktemp("tokenizers")
    made = {"bytes": small_tokenizer(), "letters": letters_tokenizer(None), "unknown": letters_tokenizer("<unk>")}
    for name, tokenizer in made.items():
        (folder / name).mkdir()
        tokenizer.save(folder / name / "tokenizer.json")
    return folder


def text(rng):
    return "".join(rng.choice(LETTERS + "é字") for _ in range(rng.choice([0, 1, 5, 40])))


def document(rng, kind):
    if rng.random() < 0.1:
        return rng.choice(['{"text": ', '{"other": 1}', "[1]"])
    if kind == "chat":
        roles = ["user", "assistant"] * rng.randint(1, 2)
        return json.dumps({"messages": [{"role": role, "content": text(rng) or "a"} for role in roles]})
    return json.dumps({"text": text(rng)})


def check_account(folder, kinds, seed):
    """Prepare generated sources, plan a run of several phases, and count again one by one; False if it is refused."""
    rng = random.Random(seed)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    tokenizer = rng.choice(["bytes", "bytes", "letters", "unknown"])
    given = {}
    for name in NAMES[: rng.randint(1, 3)]:
        kind = "chat" if tokenizer == "bytes" and rng.random() < 0.2 else "tokens"
        lines = [document(rng, kind) for _ in range(rng.randint(5, 14))] + [GOOD[kind]]
        (folder / f"{name}-in").mkdir()
        (folder / f"{name}-in" / "lines.jsonl").write_text("\n".join(lines) + "\n")
        unread = rng.sample([".hidden.jsonl", "a.md", "b.md", "empty.jsonl", "c"], rng.randint(0, 5))
        for item in unread:
            (folder / f"{name}-in" / item).touch()
        options = PrepareSettings(
            kind,
            "messages" if kind == "chat" else "text",
            heldout=rng.choice([0.3, 0.5] if name == "a" else [0, 0.5, 1]),
        )
        prepare([str(folder / f"{name}-in")], kinds / tokenizer / "tokenizer.json", folder / name, options,
                max_bad=99, workers=1)  # fmt: skip
        given[name] = kind, lines, len(unread)
    phases = [{"first_step": 2 * index, "context": rng.choice([4, 12, 40]),
               "packing": rng.choice(["windows", "bins"]), "over_length": rng.choice(["split", "trim", "drop"]),
               "mixture": rng.choice([{}, {name: 1 if name == "a" else rng.choice([0, 2])
                                           for name in given if name == "a" or rng.random() < 0.7}])}
              for index in range(rng.randint(1, 3))]  # fmt: skip
    try:
        config = run_config(folder, list(given), phases, steps=2 * len(phases) + rng.choice([0, 9]), batch=2, seed=seed)
        config = changed(config, {"evaluation.batches": rng.choice([1, None])})
        prepared = open_sources(config)
        plan = plan_run(config, prepared)
    except InputError:
        return False
    result = account(config, prepared, plan)
    used = {name: set() for name in given}
    too_long = {name: set() for name in given}
    for phase in plan.phases:
        for name, share in phase.shares.items():
            for index in range(share.rows):
                epoch, place, packed = share.phase_rows._locate(index)
                used[name] |= {part.document for part in packed.rows.parts(epoch, place) if part.stop > part.start + 1}
            if phase.config.over_length != "split":
                lengths, drops = share.phase_rows.lengths, phase.config.over_length == "drop"
                too_long[name] |= {number for number, length in enumerate(lengths)
                                   if length == 0 or (drops and length > phase.context + 1)}  # fmt: skip
    for name, (kind, lines, unread) in given.items():
        source, documents = result[name], [line for line in lines if line.strip()]
        assert sum(source["unread_files"].values()) == unread
        assert source["train"]["in_loss"] == any(
            share.phase_rows.row(index)["loss_mask"].any()
            for phase in plan.phases
            if name in phase.shares
            for share in [phase.shares[name]]
            for index in range(share.rows)
        )
        train, heldout = source["train"], source["heldout"]
        assert sum(source["refused"].values()) + train["documents"] + heldout["documents"] == len(documents)
        for use in (train, heldout):
            assert sum(use[key] for key in ("used", "too_long", "too_short", "unread")) == use["documents"]
        assert train["used"] == len(used[name])
        for use in (train, heldout):
            assert 0 <= use["read"] <= 1
            assert (use["read"] > 0) == (use["used"] > 0)
        assert train["too_long"] == len(too_long[name] - used[name])
        if kind == "tokens":
            texts = [json.loads(line)["text"] for line in lines if line.startswith('{"text": "')]
            texts = [each for each in texts if each.strip()]  # others are refused
            assert train["bytes"] + heldout["bytes"] == sum(len(each.encode()) for each in texts)
            lost = sum(len("".join(sign for sign in each if sign not in LETTERS).encode()) for each in texts)
            assert train["lost_bytes"] + heldout["lost_bytes"] == (0 if tokenizer == "bytes" else lost)
        batches = list(heldout_batches(config, prepared, name, config.evaluation.batches))
        assert heldout["in_loss"] == any(batch["loss_mask"].any() for batch in batches)
        assert {batch["tokens"].shape[1] for batch in batches} <= {phases[-1]["context"]}
        if kind == "tokens":
            assert heldout["in_loss"] == (heldout["used"] > 0)
    return True


def test_the_account_balances(tmp_path, kinds):
    assert sum(check_account(tmp_path / "data", kinds, seed) for seed in range(12)) > 3


@pytest.mark.soak
def test_the_account_of_a_thousand_corpora_balances(tmp_path, kinds):
    assert sum(check_account(tmp_path / "data", kinds, seed) for seed in range(100, 2100)) > 1000


def test_what_is_left_out_is_said_with_its_reason(tmp_path):
    talk = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    long = [{"role": "user", "content": "What is more? " * 40}, {"role": "assistant", "content": "All of it."}]
    write_source(tmp_path / "talk", [talk, talk, long], [talk, long], kind="chat")
    write_source(tmp_path / "check", [[1, 2, 3]], [[4, 5, 6, 7]])
    write_source(tmp_path / "forgotten", [[1, 2]], [[3, 4], [5, 6]])
    write_source(tmp_path / "web", [[7, 8, 9]] * 99, [])
    phase = {"packing": "bins", "over_length": "drop", "mixture": {"talk": 1, "check": 0, "web": 1}, "context": 128}
    config = run_config(tmp_path, ["talk", "check", "forgotten", "web"], [phase], steps=1, batch=2)
    assert describe(config, samples=0).split("\n\n")[-1].splitlines() == [
        "Data: 109 documents in 4 sources: 65 trained on, 3 evaluated, 41 left out:",
        "  talk: 8.7 % of the training tokens are read",
        "  talk: 1 of 3 training documents left out: longer than a row (raise context, or change over_length)",
        "  talk: 1 of 3 training documents left out: never sampled, since the run ends first",
        "  check: 1 training document left out: it is only evaluated (mixture weight 0)",
        "  forgotten: 1 training document left out: no phase's mixture names the source: add it (weight 0 only "
        "evaluates it), or remove it",
        "  forgotten: 2 of 2 held-out documents left out: see evaluation.batches and the mixtures",
        "  web: 64.6 % of the training tokens are read",
        "  web: 35 of 99 training documents left out: never sampled, since the run ends first",
        "  web: no document is held out, so the source has no held-out loss (prepare it with a larger --heldout)",
    ]


def test_skipped_rows_are_counted_for_each_source(tmp_path):
    for name in NAMES[:2]:
        write_source(tmp_path / name, [[1, 2, 3, 4, 5]] * 40, [[3, 4]])
    phases = [{"mixture": {"a": 1}}, {"mixture": {"a": 1, "b": 3}, "first_step": 2}]
    config = run_config(tmp_path, NAMES[:2], phases, steps=4, batch=4, context=4, skip_rows=[[6, 12], [13, 17]])
    prepared = open_sources(config)
    plan = plan_run(config, prepared)
    result = account(config, prepared, plan)
    sources = [int(plan[row]["sources"][0]) for row in [*range(6, 12), *range(13, 17)]]
    assert [result[name]["skipped_rows"] for name in NAMES[:2]] == [sources.count(0), sources.count(1)]
    assert f"  a: {sources.count(0)} rows skipped (data.skip_rows), but counted as trained on" in (
        account_lines(result)
    )


def test_a_source_can_be_evaluated_alone(tmp_path):
    write_source(tmp_path / "web", [[1, 2, 3]] * 9, [[3, 4]])
    write_source(tmp_path / "check", [], [[4, 5, 6, 7]])
    config = run_config(tmp_path, ["web", "check"], [{}], steps=1)
    prepared = open_sources(config)
    result = account(config, prepared, plan_run(config, prepared))
    assert result["check"]["heldout"]["used"] == 1
    assert result["check"]["phases"] == []
    assert account_lines(result) == ["Data: 11 documents in 2 sources: 9 trained on, 2 evaluated, 0 left out."]
    for mixture in ({"web": 1, "check": 1}, {"check": 1}):
        with pytest.raises(InputError, match=r"data\.sources\.check contains no training document .* to 0"):
            open_sources(run_config(tmp_path, ["web", "check"], [{"mixture": mixture}], steps=1))


def test_conversations_need_no_held_out_ones(tmp_path):
    talk = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    write_source(tmp_path / "talk", [talk], [], kind="chat")
    write_source(tmp_path / "check", [], [[4, 5, 6, 7]])
    config = run_config(tmp_path, ["talk", "check"], [{"context": 128}], steps=1, batch=1)
    prepared = open_sources(config)
    assert account_lines(account(config, prepared, plan_run(config, prepared))) == [
        "Data: 2 documents in 2 sources: 1 trained on, 1 evaluated, 0 left out.",
        "  talk: no document is held out, so the source has no held-out loss (prepare it with a larger --heldout)",
    ]


def test_a_source_without_a_token_in_the_loss_is_named(tmp_path):
    talk = [{"role": "user", "content": "What is more? " * 40}, {"role": "assistant", "content": "All of it."}]
    write_source(tmp_path / "talk", [talk] * 3, [talk] * 2, kind="chat")
    write_source(tmp_path / "web", [[1, 2, 3]] * 9, [[3, 4]])
    config = run_config(tmp_path, ["talk", "web"], [{"mixture": {"talk": 1, "web": 1}}], steps=1, batch=2)
    prepared = open_sources(changed(config, {"evaluation.batches": 1}))
    lines = account_lines(account(changed(config, {"evaluation.batches": 1}), prepared, plan_run(config, prepared)))
    messages = [line for line in lines if "loss" in line]
    assert [line.partition(", which")[0] for line in messages] == [
        f"  talk: no token of the first 1,000 {split} rows is in the loss" for split in ("training", "held-out")
    ]


def test_bytes_without_a_token_are_said_by_the_preparation_and_do_not_count(tmp_path, kinds):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "ab字 é"}) + "\n" + json.dumps({"text": "cd"}) + "\n")
    manifest = prepare([str(tmp_path / "a.jsonl")], kinds / "letters" / "tokenizer.json", tmp_path / "a",
                       PrepareSettings(heldout=0), workers=1)  # fmt: skip
    assert (manifest.train.text_bytes, manifest.train.lost_bytes) == (10, 5)
    message = summary(tmp_path / "a", manifest)
    assert "train: 5 bytes are lost, since the tokenizer has no token for them, or strips" in message
