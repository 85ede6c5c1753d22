"""Signals arrive at what tests start, even if the tests run in the background or after `nohup`."""

import signal

import pytest


@pytest.fixture(autouse=True)
def _signals_arrive():
    """A process inherits what its parent ignores, but not what it handles."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
