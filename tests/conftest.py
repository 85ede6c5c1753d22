"""What every test shares: the CPU backend, one compilation cache, and hypothesis profiles."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.compile_helpers import CHEAP
from tests.devices_helpers import close_devices

# Set before jax is imported, and inherited by the subprocesses that tests start. A value given from outside wins.
_CACHE = Path(__file__).parent.parent / ".pytest_cache" / "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("MPLBACKEND", "agg")

# Derandomized: a test that passes here passes everywhere, and the soak profile is where new examples are looked for.
# A first example compiles, so neither is timed.
_UNTIMED = {"deadline": None, "database": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("quick", derandomize=True, max_examples=10, **_UNTIMED)
hypothesis.settings.register_profile("soak", derandomize=False, max_examples=200, print_blob=True, **_UNTIMED)


def pytest_configure(config: pytest.Config) -> None:
    """Pick the hypothesis profile before any test module is imported."""
    soak = bool(os.environ.get("ZAYA_SOAK")) or config.option.markexpr.strip() == "soak"
    hypothesis.settings.load_profile("soak" if soak else "quick")
    if not soak:  # which compiles as users do
        os.environ["XLA_FLAGS"] = CHEAP


def pytest_collection_finish() -> None:
    """Look for garbage less often, and not among what was imported: tracing makes many objects, and little of it."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave tests/parity unread unless it is selected: it imports torch, which need not be installed."""
    chosen = config.option.markexpr
    selected = not chosen or ("parity" in chosen and "not parity" not in chosen)
    return True if not selected and collection_path == Path(__file__).parent / "parity" else None


def pytest_unconfigure() -> None:
    """End what tests have left running for one another."""
    close_devices()


@pytest.fixture
def signals_arrive() -> Iterator[None]:
    """Ctrl-C and SIGHUP arrive at the test and what it starts, even in the background or after `nohup`.

    A process inherits what its parent ignores, but not what it handles.
    """
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
