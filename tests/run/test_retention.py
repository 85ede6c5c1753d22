import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.test_restore import data_file, flip
from tests.checkpoint.test_store import ABOUT, abstract_state, make_state, open_store, restored
from tests.train_helpers import differing
from zaya_jax.checkpoint.reader import verify_checkpoint
from zaya_jax.config import CheckpointConfig
from zaya_jax.errors import RunStopped
from zaya_jax.run.checkpoints import Checkpoint, remove, saved_steps, steps_to_keep, usable_checkpoints

LOSSES = st.none() | st.floats(allow_nan=True, width=16)
SAVED = st.lists(
    st.tuples(st.integers(0, 60), LOSSES, st.booleans(), st.booleans()).map(lambda fields: Checkpoint(*fields)),
    max_size=12,
    unique_by=lambda checkpoint: checkpoint.step,
)
CONFIGS = st.builds(
    CheckpointConfig, keep=st.integers(1, 4), keep_every=st.none() | st.integers(1, 20), keep_best=st.integers(0, 3)
)


@settings(max_examples=60)
@given(SAVED, CONFIGS, st.sets(st.integers(0, 60), max_size=5))
def test_what_must_stay_stays_and_no_more(saved, config, read):
    kept = steps_to_keep(saved, config, read)
    steps = sorted(checkpoint.step for checkpoint in saved)
    assert kept <= set(steps)
    verified = [checkpoint.step for checkpoint in saved if checkpoint.is_verified or checkpoint.step in read]
    assert not verified or max(verified) in kept
    assert set(steps[-config.keep :]) <= kept
    pinned = {checkpoint.step for checkpoint in saved if checkpoint.is_pinned}
    assert pinned <= kept
    rest = kept - set(steps[-config.keep :]) - pinned - {max(verified, default=None)}
    if config.keep_every:
        assert {step for step in steps if step % config.keep_every == 0} <= kept
        rest -= {step for step in steps if step % config.keep_every == 0}
    looked = {x.step: x.heldout_loss for x in saved if x.heldout_loss is not None and not math.isnan(x.heldout_loss)}
    assert rest <= set(looked)
    assert len(rest) <= config.keep_best
    best = sorted(looked.values())[: config.keep_best]
    assert sorted(looked[step] for step in looked if step in kept)[: len(best)] == best
    assert steps_to_keep([x for x in saved if x.step in kept], config, read) == kept  # once is enough
    assert steps_to_keep(list(reversed(saved)), config, read) == kept


def test_the_best_are_those_of_lowest_loss_and_of_equals_the_newer():
    losses = {1: 2.0, 2: 1.0, 3: 1.0, 4: 3.0, 5: math.nan, 6: None}
    saved = [Checkpoint(step, loss) for step, loss in losses.items()]
    assert steps_to_keep(saved, CheckpointConfig(keep=1, keep_best=1)) == {3, 6}
    assert steps_to_keep(saved, CheckpointConfig(keep=1, keep_best=3)) == {1, 2, 3, 6}


class History:
    """A folder of checkpoints, what happens to it, and what is known of each: the model that the store is held to."""

    def __init__(self, folder, **config):
        self.folder, self.config = folder, config
        self.store, self.step = open_store(folder, **config), 0
        self.verified, self.damaged = set(), set()

    def save(self, _):
        self.step += 1
        self.store.save(self.step, make_state(self.step), ABOUT)
        assert self.store.wait()
        self.damaged.discard(self.step)
        if self.config["verify"] == "readback":
            self.verified.add(self.step)

    def restart(self, _):
        self.store.__exit__(None)
        intact = set(saved_steps(self.folder)) - self.damaged
        self.store = open_store(self.folder, **self.config)
        if not intact:
            with pytest.raises(RunStopped):
                restored(self.store, abstract_state(3))
            self.store.__exit__(None)
            raise StopIteration
        self.step, state = restored(self.store, abstract_state(3))
        assert self.step == max(intact)
        assert not differing(state, make_state(self.step))
        self.verified.add(self.step)
        self.store.take_over(self.step)

    def prune(self, _):
        """As another process does, by command."""
        saved = usable_checkpoints(self.folder)
        for step in {x.step for x in saved} - steps_to_keep(saved, CheckpointConfig(**self.config)):
            remove(self.folder, step)

    def corrupt(self, index):
        there = saved_steps(self.folder)
        if there:
            step = there[index % len(there)]
            if step not in self.damaged:  # for a second flip could undo the first
                flip(data_file(self.folder / str(step)), 30)
            self.damaged.add(step)

    def lose_manifest(self, index):
        there = saved_steps(self.folder)
        if there:
            step = there[index % len(there)]
            next((self.folder / str(step)).glob("manifest-*")).unlink()
            self.damaged.add(step)

    def known(self):
        """The steps of the checkpoints that were found whole and that nothing has been seen of since."""
        return self.verified & set(saved_steps(self.folder))


ACTIONS = ("save", "restart", "prune", "corrupt", "lose_manifest")


@pytest.mark.parametrize("verify", ["hash", "readback"])
@settings(max_examples=5)
@given(
    actions=st.lists(st.tuples(st.sampled_from((*ACTIONS, "save", "restart")), st.integers(0, 9)), max_size=8),
    keep=st.integers(1, 2),
)
def test_whatever_happens_the_last_verified_one_stays(tmp_path_factory, verify, actions, keep):
    """With real folders: saving and pruning remove no checkpoint that was read, found whole and is the newest such."""
    history = History(tmp_path_factory.mktemp("run"), keep=keep, verify=verify)
    history.save(0)
    try:
        for action, index in actions:
            before = history.known()
            getattr(history, action)(index)
            if action in ("save", "prune") and before:
                assert max(history.known(), default=0) >= max(before), (action, before)
            for step in set(saved_steps(history.folder)) & history.verified - history.damaged:
                assert verify_checkpoint(history.folder / str(step)) == []
    except StopIteration:
        return
    history.store.__exit__(None)


def test_that_it_was_read_is_known_to_those_that_go_on(tmp_path):
    for step in (1, 2, 3, 4):
        with open_store(tmp_path, keep=1) as store:
            if step == 2:
                restored(store, abstract_state(3))
            store.save(step, make_state(step), ABOUT)
    assert saved_steps(tmp_path) == [1, 4]
    assert [checkpoint.is_verified for checkpoint in usable_checkpoints(tmp_path)] == [True, False]
