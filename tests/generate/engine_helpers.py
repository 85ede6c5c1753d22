"""Engines for tests: small chunks, and programs that compile fast, once a process."""

import functools

import jax
import pytest

from tests.helpers import random_model
from tests.train_helpers import MODEL, fast_jit
from zaya_jax.generate import engine, steps

CHUNK = 4
programs = functools.lru_cache(steps.make_programs.__wrapped__)


@functools.cache
def model():
    """A model on its device, as weights are that were read."""
    return jax.device_put(random_model(MODEL, seed=1), jax.devices()[0])


def patch_engine(patch):
    patch.setattr(engine, "CHUNK", CHUNK)
    patch.setattr(engine, "make_programs", programs)
    patch.setattr(steps, "_jit", fast_jit)


@pytest.fixture
def fast_engine(monkeypatch):
    patch_engine(monkeypatch)


def compilations(made):
    """How often the programs of an engine, of prefill and of decode steps, were compiled."""
    return [program._cache_size() for program in made._compiled[1]]
