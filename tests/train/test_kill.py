"""A run that is killed, with real signals, and started again is bitwise the run that was not."""

import pytest

from tests.train.kill_helpers import check_kills


@pytest.mark.soak
def test_a_kill_changes_no_row_and_no_parameter(tmp_path):
    check_kills(tmp_path, steps=20, kills=1, seed=8)
