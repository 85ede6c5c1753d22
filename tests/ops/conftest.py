"""Small blocks for the whole room, so that tiny shapes visit several."""

from tests.helpers import folder_blocks

pytest_runtest_setup, pytest_runtest_teardown = folder_blocks(8)
