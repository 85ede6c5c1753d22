import dataclasses
import re

import numpy as np
import pytest

from tests.data_helpers import run_config, small_tokenizer, write_source
from zaya_jax.config import BatchConfig
from zaya_jax.data.describe import describe, render_row

CHAT = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "It is 2.", "reasoning": "Count. " * 40},
]


@pytest.fixture
def config(tmp_path):
    tokenizer = small_tokenizer()
    texts = [[tokenizer.eot, *tokenizer.encode(f"def function_{i}(self):\n" * 3), tokenizer.eot] for i in range(30)]
    write_source(tmp_path / "code", texts, texts[:2])
    write_source(tmp_path / "talk", [CHAT] * 10, [CHAT], kind="chat")
    phases = [
        {"mixture": {"code": 1}},
        {"first_step": 4, "mixture": {"code": 1, "talk": 3}, "packing": "bins", "over_length": "trim", "context": 128},
    ]
    return run_config(tmp_path, ["code", "talk"], phases)


def test_everything_is_told(config, tmp_path):
    text = describe(config, samples=1)
    numbers = {tuple(line.split()[:4]) for line in text.splitlines()}
    assert ("code", "tokens", "train", "30") in numbers
    assert ("talk", "chat", "heldout", "1") in numbers
    assert "Phase phase0: steps 0 to 4, 8 rows of 16 tokens per step, windows, 512 tokens" in text
    assert "Phase phase1: steps 4 to 8, 8 rows of 128 tokens per step, bins, 4,096 tokens" in text
    assert re.search(r"talk +24 +3,072 +75\.00 % +\d\.\d{3} +\d+\.\d{3} %  +none", text)
    assert re.search(r"talk .*  none +129 / 129 / 129\n", text)  # all are cut to the row
    assert "talk: conversations trimmed to 128 tokens: 0 kept, 10 reasoning cut, 0 earlier removed, 0 dropped" in text
    assert "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n[[<think>\nCount. " in text
    assert "It is 2.<|im_end|>]]" in text
    assert not (tmp_path / "run").exists()  # another run may live there


def test_trimmed_documents_are_as_many_in_the_table_as_in_the_account(config):
    phases = config.phases[0], dataclasses.replace(config.phases[1], mixture=config.phases[0].mixture, context=8)
    text = describe(dataclasses.replace(config, phases=phases), samples=0)
    in_table = re.search(r"^code .* (\d+) trimmed", text, re.MULTILINE)
    in_account = re.search(r"code: (\d+) of 30 training documents trimmed", text)
    assert in_table
    assert in_account
    assert in_table[1] == in_account[1]


def test_a_batch_that_rises_is_told_by_its_sizes(config):
    batch = BatchConfig(tokens=64, start=32, ramp_tokens=256)
    rising = dataclasses.replace(config.phases[0], batch=batch)
    text = describe(dataclasses.replace(config, phases=(rising, config.phases[1])), samples=0)
    assert "Phase phase0: steps 0 to 10, 2 then 4 rows of 16 tokens per step, windows, 512 tokens" in text
    assert "Phase phase1: steps 10 to 14, 8 rows of 128 tokens per step, bins, 4,096 tokens" in text


def test_skipped_rows_are_told_with_the_phase_that_skips_them(config):
    data = dataclasses.replace(config.data, skip_rows=((30, 40), (45, 46)))  # the first phase ends with row 41
    text = describe(dataclasses.replace(config, data=data), samples=0)
    assert "8 rows of 16 tokens per step, windows, 512 tokens in all, 10 rows skipped" in text
    assert "8 rows of 128 tokens per step, bins, 4,096 tokens in all, 1 row skipped" in text


def test_a_row_shows_documents_apart_and_what_counts():
    tokenizer = small_tokenizer()
    left, right = tokenizer.encode("def one"), tokenizer.encode("return two")
    tokens = np.array([*left, *right, 0, 0], np.int32)
    targets = np.array([*left[1:], right[0], *right[1:], tokenizer.eot, 0, 0], np.int32)
    segments = np.array([1] * len(left) + [2] * len(right) + [0, 0], np.int32)
    mask = np.array([True] * (len(left) - 1) + [False] + [False] * (len(right) - 1) + [True, False, False])
    row = {"tokens": tokens, "targets": targets, "segment_ids": segments, "loss_mask": mask}
    first = tokenizer.decode(left[:1])
    assert render_row(row, tokenizer) == f"{first}[[{'def one'[len(first) :]}]]\n----\nreturn two[[<|endoftext|>]]"


def test_a_row_of_padding_shows_nothing():
    empty = {name: np.zeros(4, np.int32) for name in ("tokens", "targets", "segment_ids")}
    assert render_row({**empty, "loss_mask": np.zeros(4, bool)}, small_tokenizer()) == ""
