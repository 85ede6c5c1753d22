import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from tests.checkpoint.test_store import open_store
from tests.train_helpers import CONFIG, change, make_program
from zaya_jax.config import from_dict
from zaya_jax.errors import InputError
from zaya_jax.run.checkpoints import named_steps
from zaya_jax.train.initialization import initialize, open_init_from
from zaya_jax.train.program import make_programs
from zaya_jax.train.resumption import checkpoint_metadata, resume

POSITION = {"sequences": 24}


class Batches:
    """Batches at a position."""

    position = None

    def set_state(self, position):
        self.position = position


@pytest.fixture
def run(tmp_path):
    """The configuration of a run with a checkpoint of step 3, which holds next to nothing."""
    config = change(CONFIG, {"run_dir": str(tmp_path / "run")})
    with open_store(tmp_path / "run" / "checkpoints") as store:
        store.save(3, {"x": jnp.ones(3)}, checkpoint_metadata(config, 3, POSITION, 1.25, 0))
    return config


def test_a_checkpoint_says_what_it_is_of_and_json_keeps_it():
    saved = checkpoint_metadata(CONFIG, 3, POSITION, 1.25, 0)
    assert json.loads(json.dumps(saved)) == saved
    assert (saved["phase"], saved["data"], saved["heldout_loss"]) == ("train", POSITION, 1.25)
    assert saved["tokens_seen"] == 3 * CONFIG.train.batch.tokens
    assert saved["batch"] == {"sequences": 8, "context": 32}
    assert from_dict(saved["config"]) == CONFIG
    other = checkpoint_metadata(dataclasses.replace(CONFIG, seed=1), 3, POSITION, None, 0)
    assert (
        other["config_digest"] != saved["config_digest"] == checkpoint_metadata(CONFIG, 4, {}, None, 0)["config_digest"]
    )


def test_another_architecture_is_refused_before_an_array_is_read(run):
    message = r"a different architecture: model\.num_experts=4 \(this configuration has 8\)\. Set the same value, or "
    config = change(run, {"model.num_experts": 8})
    with open_store(Path(run.run_dir) / "checkpoints") as store, pytest.raises(InputError, match=message):
        resume(config, make_programs(config), store, Batches())
    with pytest.raises(InputError, match=f"^init_from={run.run_dir} .*{message}"):
        open_init_from(change(config, {"run_dir": "elsewhere", "init_from": run.run_dir}))


@pytest.mark.parametrize(
    ("key", "value"),
    [("optimizer.balance.rule", "sign"), ("optimizer.matrices", "adamw"), ("optimizer.muon.momentum_form", "ema")],
)
def test_an_optimizer_of_another_state_is_refused(run, key, value):
    config = change(run, {key: value, "run_dir": "elsewhere", "init_from": run.run_dir})
    with pytest.raises(InputError, match=rf"was made with {key}='.*', but .* has '{value}'.* Set the same value"):
        initialize(make_program(config), open_init_from(config))


def test_the_place_in_the_data_is_that_of_the_checkpoint_and_other_arrays_are_named(run):
    batches = Batches()
    with open_store(Path(run.run_dir) / "checkpoints") as store:
        with pytest.raises(InputError, match="it has no array params"):
            resume(run, make_programs(run), store, batches)
        assert batches.position == POSITION
        assert named_steps(store.folder) == [3]  # which is not damaged
