"""The timer, and passes of queued calls."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zaya_jax.lab.measure import timing
from zaya_jax.lab.measure.timing import Queue, time_calls


def test_the_call_to_warm_up_and_what_comes_before_are_not_timed(monkeypatch):
    clock, calls = iter([0.0, 100.0, 200.0, 201.0, 300.0, 302.0]), []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    assert time_calls(lambda: calls.append("call"), 2, before=lambda: calls.append("before")) == (1.5, [1.0, 2.0])
    assert calls == ["before", "call"] * 3


def test_a_pass_has_as_many_calls_as_it_takes_and_one_wait(monkeypatch):
    now, calls, waits = [0.0], [], []

    def call():
        calls.append(1)
        now[0] += 0.003

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    one_pass = timing.repeated(call, lambda: waits.append(len(calls)), 8)
    calls.clear(), waits.clear()
    number = one_pass()
    assert number == 8 * len(calls)
    assert waits == [len(calls)]
    assert timing.PASS <= 0.003 * len(calls) <= 2.1 * timing.PASS


@pytest.fixture
def one_call(monkeypatch):
    """A pass is a single call."""
    monkeypatch.setattr(timing, "repeated", lambda call, wait, counts: call)


def test_calls_of_one_program_are_all_done(monkeypatch, one_call):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing, "TOGETHER", 3)
    monkeypatch.setattr(jax, "jit", lambda run, **_: jax.make_jaxpr(run))
    queue = Queue(jnp.dot, (jnp.ones((8, 8)), jnp.ones((8, 8))))
    queue.make_pass()()
    program = queue._last
    assert [equation.primitive.name for equation in program.eqns] == ["dot_general"] * 3
    assert len({variable for equation in program.eqns for variable in equation.invars}) == 6


def test_what_is_held_is_given_away_and_is_the_next_call_s(monkeypatch, one_call):
    seen, donated = [], []
    monkeypatch.setattr(jax, "jit", lambda run, donate_argnums: donated.append(donate_argnums) or run)

    def function(held, given, further):
        seen.append((held.item(), further))
        return held + given, "not held"

    call = Queue(function, (np.array(0), np.array(2)), 1).make_pass(7)
    for _ in range(3):
        call()
    assert seen == [(0, 7), (2, 7), (4, 7)]
    assert donated == [0]


def test_short_calls_are_many_of_one_program_on_a_gpu(monkeypatch):
    small, large = ((jnp.zeros(size, jnp.int8),) for size in (8, 100))
    monkeypatch.setattr(timing, "SHORT", 100)
    assert Queue(jnp.negative, small).calls == 1
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert [Queue(jnp.negative, arrays).calls for arrays in (small, large)] == [8, 1]
    assert Queue(jnp.negative, small, held=1).calls == 1
