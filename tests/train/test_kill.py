"""A run that is killed, with real signals, and started again is bitwise the run that was not."""

from tests.train_helpers import check_kills


def test_three_kills_change_no_row_and_no_parameter(tmp_path):
    check_kills(tmp_path, steps=45, kills=3, seed=0)
