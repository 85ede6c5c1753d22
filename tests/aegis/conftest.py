"""Signals arrive at what tests start."""

import pytest


@pytest.fixture(autouse=True)
def _signals_arrive(signals_arrive):
    pass
