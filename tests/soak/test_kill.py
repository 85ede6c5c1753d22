"""As tests/train/test_kill.py, with ten moments."""

import pytest

from tests.train.kill_helpers import check_kills


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2])
def test_ten_kills_change_no_row_and_no_parameter(tmp_path, seed):
    check_kills(tmp_path, steps=60, kills=10, seed=seed)
