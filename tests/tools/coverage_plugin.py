"""A pytest plugin that tells coverage.py, in each process, which test is running. See `coverage_map`."""

import contextlib
import os

import coverage
import pytest


def _switch(test: str) -> None:
    os.environ["COVER_TEST"] = test  # for the processes that it starts
    current = coverage.Coverage.current()
    if current is not None:
        current.switch_context(test)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    _switch(item.nodeid)
    result = yield
    _switch("")
    return result


def call(test: str, function: str, arguments: tuple) -> object:
    """Call `function` ("module:name") in the process of `tests.devices_helpers`, for `test`."""
    import importlib

    _switch(test)
    module, _, name = function.partition(":")
    try:
        return getattr(importlib.import_module(module), name)(*arguments)
    finally:
        _switch("")


def pytest_configure() -> None:
    """Name the test in every call of `on_devices`, and let its process write what it covered."""
    # It holds the settings of the first process; those of the file name the test that runs.
    os.environ.pop("COVERAGE_PROCESS_CONFIG", None)
    from tests.devices_helpers import Devices

    ask = Devices.call

    def named(self, function, arguments, seconds=300):
        return ask(self, "coverage_plugin:call", (os.environ["COVER_TEST"], function, arguments), seconds)

    def close(self):
        with contextlib.suppress(BrokenPipeError), self._process as process:
            process.stdin.close()
            process.wait()
        self._said.close()

    Devices.call, Devices.close = named, close
