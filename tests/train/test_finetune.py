"""From a file of conversations to adapters fine-tuned on what assistants say: prepare, describe, train."""

import dataclasses
import json
import random
import shutil

import jax
import numpy as np
import pytest
import yaml

from tests.checkpoint.test_store import abstract
from tests.data_helpers import small_tokenizer
from tests.train.test_interruption import train_until
from tests.train.test_step import drawn
from tests.train_helpers import (
    MODEL,
    PLAIN,
    change,
    compute_little,
    differing,
    fast_jit,
    make_program,
    setup,
    trained,
)
from zaya_jax.config import load_config, to_dict
from zaya_jax.data.__main__ import main as data_main
from zaya_jax.data.loading.batches import heldout_text, train_batches
from zaya_jax.data.loading.sources import open_sources
from zaya_jax.errors import InputError
from zaya_jax.evaluate.evaluator import ModelSnapshot
from zaya_jax.evaluate.heldout import heldout_loss
from zaya_jax.generate.decode import Continuation
from zaya_jax.model.tree import parameters
from zaya_jax.run.folder import METRICS
from zaya_jax.run.metrics import read_rows
from zaya_jax.train import initialization
from zaya_jax.train.final_report import report
from zaya_jax.train.fit import run_training
from zaya_jax.train.initialization import load_frozen_base, open_init_from


def conversations(rng):
    for _ in range(120):
        messages = []
        for _ in range(rng.randint(1, 2)):
            first, second = rng.randint(0, 9), rng.randint(0, 9)
            thought = "<think>" + "so, " * rng.randint(0, 30) + "</think>"
            messages += [{"role": "user", "content": f"{first} and {second}?"},
                         {"role": "assistant", "content": f"{thought}return {first + second}"}]  # fmt: skip
        yield messages


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The configuration and the result of a run of little steps from a model at random, and the folder of both."""
    folder = tmp_path_factory.mktemp("tuned")
    rng = random.Random(0)
    small_tokenizer().save(folder / "tokenizer.json")
    texts = [{"text": f"def function_{i}(self, value):\n    return value + {i}\n" * 3} for i in range(60)]
    (folder / "code.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    talk = [{"messages": messages} for messages in conversations(rng)]
    (folder / "talk.jsonl").write_text("".join(json.dumps(each) + "\n" for each in talk))
    for name, more in (("code", []), ("talk", ["--chat"])):
        assert data_main(["prepare", "--input", str(folder / f"{name}.jsonl"), "--output", str(folder / name),
                          "--tokenizer", str(folder / "tokenizer.json"), "--heldout", "0.2", *more]) == 0  # fmt: skip
    tree = {
        "run_dir": str(folder / "run"),
        "model": to_dict(MODEL) | PLAIN | {"max_positions": 128},
        "data": {
            "cache_dir": str(folder / "cache"), "context": 96,
            "sources": {name: {"path": str(folder / name)} for name in ("code", "talk")},
        },
        "phases": [
            {"name": "text", "tokens": 6 * 4 * 96, "mixture": {"code": 1}},
            {"name": "chat", "tokens": 14 * 4 * 96, "mixture": {"talk": 1}, "packing": "bins", "over_length": "trim"},
        ],
        "train": {"batch": {"tokens": 4 * 96}, "log_every": 5, "spike": {"window": 0}},
        "optimizer": {"matrices": "adamw", "adamw": {"learning_rate": 0.05}},  # which compiles faster than Muon
        "evaluation": {"every": 6, "batch_size": 4},
        "checkpoint": {"every": 6},
        "sample": {"prompt": "return", "tokens": 4},
    }  # fmt: skip
    (folder / "tune.yaml").write_text(yaml.safe_dump(tree))
    config = load_config(folder / "tune.yaml")
    with pytest.MonkeyPatch.context() as patch:
        compute_little(patch)
        zeros = initialization.init_state

        def at_random(program):
            params, balance = drawn(config)
            return dataclasses.replace(zeros(program), params=params, balance=balance)

        patch.setattr(initialization, "init_state", at_random)
        return config, run_training(config), folder


def test_rows_and_report_tell_the_sources_of_each_phase_apart(tuned):
    config, result, _ = tuned
    rows = read_rows(result.run_dir / METRICS)
    assert [row["step"] for row in rows] == list(range(1, 21))
    heldout = [row["heldout_loss_by_source"] for row in rows if "heldout_loss_by_source" in row]
    assert len(heldout) == 4
    assert heldout[-1] == {name: loss.nats_per_token for name, loss in result.heldout_by_source.items()}
    assert len(set(heldout[-1].values())) == 2
    assert set(result.heldout_by_source) == {"code", "talk"}
    assert result.heldout.tokens == sum(loss.tokens for loss in result.heldout_by_source.values())
    assert [row["loss_by_source"] for row in (rows[4], rows[9])] == [
        {"code": pytest.approx(rows[4]["loss"])}, {"talk": pytest.approx(rows[9]["loss"])}
    ]  # fmt: skip
    text = report(change(config, {"sample.tokens": 0}), result)
    assert "documents of code: " in text
    assert "documents of talk: " in text


def test_describe_shows_the_conversations(tuned, capsys):
    _, _, folder = tuned
    assert data_main(["describe", str(folder / "tune.yaml")]) == 0
    text = capsys.readouterr().out
    assert "Phase chat: steps 6 to 20, 4 rows of 96 tokens per step, bins" in text
    sample = text.partition("Phase chat, source talk, row 0")[2].partition("\n")[2]
    assert "<|im_start|>user\n" in sample
    assert "[[" in sample
    assert "return" in sample.partition("[[")[2].partition("]]")[0]


# --- adapters --------------------------------------------------------------------------------------------------


def adapters_on(folder, run, *overrides):
    """The configuration of a run that trains adapters on conversations, from where the phase of texts ended."""
    tree = yaml.safe_load((folder / "tune.yaml").read_text())
    tree |= {
        "run_dir": str(run), "init_from": f"{folder / 'run'}@text", "lora": {"rank": 4, "alpha": 8},
        "phases": [tree["phases"][1] | {"schedule": {"shape": "constant"}}], "checkpoint": {"every": 5},
    }  # fmt: skip
    del tree["data"]["sources"]["code"]
    tree["optimizer"] |= {"balance": {"rule": "none"}, "adamw": {"learning_rate": 0.05, "weight_decay": 0.0}}
    path = folder / f"{run.name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return load_config(path, overrides)


@pytest.fixture(scope="module")
def adapted(tuned):
    """The configuration and the result of a run of adapters."""
    _, _, folder = tuned
    return trained(adapters_on(folder, folder / "adapted"))


def test_adapters_learn_to_answer_and_nothing_else_moves(tuned, adapted, monkeypatch):
    _, whole, _ = tuned
    config, result = adapted
    rows = read_rows(result.run_dir / METRICS)
    losses = [row["loss"] for row in rows]
    assert np.mean(losses[-4:]) < np.mean(losses[:4]) - 0.3
    heldout = [row["heldout_loss"] for row in rows if "heldout_loss" in row]
    assert heldout[-1] < heldout[0] - 0.3
    assert all(name.endswith((".lora_a", ".lora_b")) for name in result.state.params)
    assert not differing(result.state.balance, open_init_from(config).load(abstract(whole.state.balance)))
    saved = sum(x.size for x in jax.tree.leaves(result.state) if x.ndim)
    assert saved < sum(x.size for x in whole.state.params.values())  # moments and all
    models = []
    monkeypatch.setattr("zaya_jax.train.sample.generate_tokens", lambda model, *_, **__: (
        models.append(parameters(model)), [Continuation([5, 6], [], stopped=False)])[1])  # fmt: skip
    assert report(config, result).count("Continuation of") == 1
    assert models[0].keys() == whole.state.params.keys()  # of the merged model


def test_the_loss_depends_on_what_assistants_say_alone(adapted):
    config, result = adapted
    tokenizer = result.prepared.tokenizer
    with train_batches(config, open_sources(config)) as batches:
        batch = next(batches)
    said = tokenizer.decode(batch["targets"][batch["loss_mask"]].tolist())
    unsaid = tokenizer.decode(batch["targets"][~batch["loss_mask"] & (batch["segment_ids"] > 0)].tolist())
    assert ("return" in said, "return" in unsaid) == (True, False)
    assert (" and " in said, " and " in unsaid) == (False, True)
    assert 0.1 < batch["loss_mask"].mean() < 0.9
    base = load_frozen_base(make_program(config), open_init_from(config)).params

    def step(targets):
        changed = {name: array[None] for name, array in (batch | {"targets": targets}).items()}
        state, metrics = setup(config).compiled(result.state, changed, base)
        assert float(metrics["tokens"]) == batch["loss_mask"].sum()
        return float(metrics["loss"]), state

    loss, state = step(batch["targets"])
    other = (batch["targets"] + 7) % MODEL.vocab_size
    unsaid_loss, unsaid_state = step(np.where(batch["loss_mask"], batch["targets"], other))
    assert unsaid_loss == loss
    assert not differing(unsaid_state, state)
    first = np.argwhere(batch["loss_mask"])[0]
    targets = batch["targets"].copy()
    targets[tuple(first)] = other[tuple(first)]
    said_loss, said_state = step(targets)
    assert said_loss != loss
    assert differing(said_state.params, state.params)


def test_the_merged_model_has_the_loss_of_the_run(adapted):
    """A full model of the merged parameters, which is what an export holds, evaluated without any adapter."""
    config, result = adapted
    plain = dataclasses.replace(config, lora=None)
    program = make_program(plain)
    step = fast_jit(program.evaluation_step)
    model = ModelSnapshot(parameters(result.model), result.state.balance, {}, program.placement, step)
    batches = heldout_text(config, result.prepared, "talk", config.evaluation.batches).read()
    loss, within = heldout_loss(model, batches), result.heldout_by_source["talk"]
    assert loss.tokens == within.tokens
    # Not bitwise on every CPU: the run's program also merges the adapters, and may sum in another order.
    assert loss.nats == pytest.approx(within.nats, rel=1e-6)


@pytest.mark.usefixtures("quick")
def test_a_run_of_adapters_goes_on_bitwise(adapted, tuned):
    _, result = adapted
    _, _, folder = tuned
    config = adapters_on(folder, folder / "stopped")
    train_until(config, 8)
    again = run_training(config)
    assert not differing(again.state, result.state)
    assert (again.run_dir / METRICS).read_bytes() == (result.run_dir / METRICS).read_bytes()


@pytest.mark.usefixtures("quick")
def test_another_base_is_refused_and_nothing_is_written(adapted, tuned, tmp_path):
    """The folder that init_from names holds another run's parameters when the run goes on."""
    _, result = adapted
    _, _, folder = tuned
    moved = tmp_path / "base"
    shutil.copytree(folder / "run" / "checkpoints" / "6", moved / "checkpoints" / "6")
    first = adapters_on(folder, tmp_path / "run", f"init_from={moved}")
    train_until(first, 8)
    shutil.copytree(folder / "run" / "checkpoints" / "20", moved / "checkpoints" / "20")  # the run has gone on
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=r"parameters of init_from=.* adapters"):
        run_training(first)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    with pytest.raises(InputError, match=r"^init_from=.* contains adapters"):
        run_training(adapters_on(folder, tmp_path / "second", f"init_from={result.run_dir}"))
    with pytest.raises(InputError, match=r"^init_from=.* contains adapters"):
        run_training(adapters_on(folder, tmp_path / "third", f"init_from={result.run_dir}", "lora=null"))
