"""The kills of tests/data/prepare/test_kill.py, at random moments and before every change of a file."""

import random
import signal
import time

import pytest

from tests.data.prepare.test_kill import Command, check_every_moment
from tests.data.prepare_helpers import QUARTER, check_nothing_else, contents, count_notes, make_texts, write_jsonl
from zaya_jax.data.prepare.manifest import MANIFEST
from zaya_jax.data.prepare.preparation import prepare
from zaya_jax.data.readers.inputs import list_units
from zaya_jax.data.tokenizer import train_tokenizer


@pytest.fixture
def tokenizer(tmp_path):
    (tmp_path / "stopped").touch()  # so that commands do not stop at their first unit
    train_tokenizer(make_texts(100), 300).save(tmp_path / "tokenizer.json")
    return tmp_path / "tokenizer.json"


def wait_for_notes(command, output, count):
    while count_notes(output) < count and command.process.poll() is None:
        time.sleep(0.001)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
def test_sixteen_kills_at_random_moments_change_no_byte(tmp_path, tokenizer, seed):
    texts_file, unit_bytes, rng = write_jsonl(tmp_path / "in.jsonl", make_texts(1500)), 2000, random.Random(seed)
    units = len(list_units([str(texts_file)], unit_bytes=unit_bytes))
    prepare([str(texts_file)], tokenizer, tmp_path / "good", QUARTER, unit_bytes=unit_bytes, workers=1)
    kills = interrupted = merging = folders = 0
    while kills < 16 or merging < 4:
        output = tmp_path / f"out{folders}"
        folders += 1
        assert folders < 40
        while True:
            before = count_notes(output)
            command = Command(texts_file, tokenizer, output, unit_bytes, rng.randint(1, 3))
            match rng.randrange(3):  # the merge and, on a fast machine, the units are met by chance too seldom
                case 0:
                    wait_for_notes(command, output, units)
                    time.sleep(rng.uniform(0, 0.08))
                case 1:
                    wait_for_notes(command, output, before + rng.randint(1, max(1, (units - before) // 2)))
                    time.sleep(rng.uniform(0, 0.03))
                case 2:
                    time.sleep(rng.uniform(0, 2))
            status = command.kill()
            if status == 0:
                break
            assert status == -signal.SIGKILL
            kills += 1
            done = count_notes(output)
            interrupted += before < done < units and not (output / MANIFEST).exists()
            merging += done == units or (output / MANIFEST).exists()
        prepare([str(texts_file)], tokenizer, output, QUARTER, unit_bytes=unit_bytes, workers=1)
        assert contents(output) == contents(tmp_path / "good")
        check_nothing_else(output)
    assert interrupted >= 3


@pytest.mark.soak
@pytest.mark.parametrize("tasks", [1, 2])
def test_a_kill_before_every_change_of_a_file_changes_no_byte(tmp_path, tokenizer, tasks):
    texts_file = write_jsonl(tmp_path / "in.jsonl", make_texts(20))
    assert check_every_moment(tmp_path, tokenizer, texts_file, unit_bytes=900, tasks=tasks, part=1) > 60
