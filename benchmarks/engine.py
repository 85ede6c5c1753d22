"""Time an engine: steps against the copy rate, requests of random lengths against batches, and memory under cancels."""

import argparse
import dataclasses
import random
import time
from typing import Any

import jax
import psutil

from benchmarks.benchmark_command import command, flag, start_result
from benchmarks.step import default_config
from zaya_jax.generate.engine import Engine
from zaya_jax.generate.steps import BLOCK
from zaya_jax.lab.measure.memory import time_kernel
from zaya_jax.lab.measure.step_parts import random_model
from zaya_jax.lab.measure.timing import time_calls
from zaya_jax.model.arithmetic import active_parameters, cached_values, total_parameters
from zaya_jax.model.zaya import Zaya

_PROMPT, _COPIED = 512, 2**28  # tokens; bytes of the copy
_SLOTS, _LONGEST, _MOST_NEW = 16, 512, 64


def run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Time an engine's steps and requests, and watch its memory.

    Uses a model of 52.75M parameters in fp32. Prints a step beside the time that its weights and cache take at the rate
    of a copy in the same run, the host's time a call, tokens/s of requests of random lengths that join and leave beside
    those of the same requests in batches, and the memory while requests are cancelled at random.

    engine --requests 1000 --minutes 10 --output engine.json
    """
    config = default_config().model
    model = random_model(config, "float32")
    size = f"{total_parameters(config):,} parameters, float32"
    result = start_result("engine", size, "the same requests in batches", ("flax",))
    small = dataclasses.replace(config, num_layers=1, hidden_size=16, vocab_size=64, expert_size=16, head_dim=16)
    tiny = _decoding(random_model(small, "float32"), 64, 4)
    one, block = (min(_processor_seconds(tiny, count) for _ in range(10)) for count in (1, BLOCK))
    host = (BLOCK * one - block) / (BLOCK - 1)  # what does not grow with the number of steps
    print(f"host: {1e3 * host:.2f} ms of processor time a call for 64 rows", flush=True)
    steps = {str(batch): _step(model, batch) for batch in (1, 8)}
    requests, memory = _throughput(model, parsed.requests), _memory(model, parsed.minutes)
    result["results"] = {"host_seconds": host, "steps": steps, "requests": requests, "memory": memory}
    return result


def _decoding(model: Zaya, batch: int, prompt: int) -> Engine:
    """Make an engine whose requests all decode."""
    engine = Engine(model, slots=batch, length=prompt + 32 * BLOCK)
    for _ in range(batch):
        engine.submit([0] * prompt, 32 * BLOCK)
    while not engine.step(1):
        pass
    return engine


def _processor_seconds(engine: Engine, steps: int) -> float:
    start = time.process_time()
    engine.step(steps)
    return time.process_time() - start


def _step(model: Zaya, batch: int) -> dict[str, float]:
    engine, config, seconds, copies = _decoding(model, batch, _PROMPT), model.config, list[float](), list[float]()
    for _ in range(5):
        seconds.append(time_calls(engine.step, 2).median / BLOCK)
        copies += time_kernel("Copy", _COPIED, 2)
    e, head = config.num_experts, config.vocab_size * config.hidden_size
    chosen = e * (1 - (1 - 1 / e) ** batch)  # experts of a layer that so many tokens choose on average
    one = (total_parameters(config) - active_parameters(config) - head) / (e - 1)  # the parameters of an expert
    weights = active_parameters(config) + head + (chosen - 1) * one
    read = 4 * (weights + batch * cached_values(config, engine.length))
    rate, step = 2 * _COPIED / min(copies), min(seconds)
    bound = f"{read / 1e6:,.0f} MB at the copy's {rate / 1e9:.1f} GB/s"
    print(f"batch {batch}: {1e3 * step:.2f} ms a step, {step * rate / read:.2f} × the time of {bound}", flush=True)
    return {"seconds": step, "bytes": read, "copy_bytes_per_second": rate, "ratio": step * rate / read}


def _throughput(model: Zaya, count: int) -> dict[str, float]:
    draw = random.Random(0)
    asked = [(draw.randint(1, _LONGEST), draw.randint(1, _MOST_NEW)) for _ in range(count)]
    engine = Engine(model, slots=_SLOTS, length=_LONGEST + _MOST_NEW)

    def tokens_per_second(asked: list[tuple[int, int]], together: int) -> float:
        start = time.perf_counter()
        for first in range(0, len(asked), together):
            for prompt, new in asked[first : first + together]:
                engine.submit([1] * prompt, new)
            while engine.busy:
                engine.step()
        return sum(new for _, new in asked) / (time.perf_counter() - start)

    tokens_per_second([*asked[:_SLOTS], (_LONGEST, 1)], _SLOTS)  # compiles
    batches, joining = (tokens_per_second(asked, together) for together in (_SLOTS, count))
    speeds = f"{joining:,.0f} new tokens/s, {batches:,.0f} in batches of {_SLOTS}"
    print(f"{count:,} requests: {speeds}: {joining / batches:.2f} × as fast", flush=True)
    return {"requests": count, "slots": _SLOTS, "tokens_per_second": joining, "in_batches": batches}


def _memory(model: Zaya, minutes: float) -> dict[str, Any]:
    """Submit and cancel at random, and return the resident MB at each tenth of the time."""
    draw, process, start = random.Random(1), psutil.Process(), time.monotonic()
    engine, running = Engine(model, slots=_SLOTS, length=_LONGEST + _MOST_NEW), set[int]()
    resident, cancelled = list[int](), 0
    while (passed := time.monotonic() - start) < 60 * minutes:
        while len(running) < 2 * _SLOTS:
            running.add(engine.submit([1] * draw.randint(1, _LONGEST), draw.randint(1, _MOST_NEW)))
        if draw.random() < 0.5:
            engine.cancel(handle := draw.choice(sorted(running)))
            running.remove(handle)
            cancelled += 1
        running -= {update.handle for update in engine.step() if update.finished}
        if passed >= 6 * minutes * len(resident):
            resident.append(process.memory_info().rss // 10**6)
    arrays = len(jax.live_arrays())
    print(f"memory in {minutes:g} minutes: {resident} MB, {cancelled} cancelled, {arrays} arrays alive", flush=True)
    return {"minutes": minutes, "resident_megabytes": resident, "cancelled": cancelled, "arrays": arrays}


_FLAGS = {"--requests": flag(1000, "N", "requests"), "--minutes": flag(10.0, "T", "minutes of random cancels")}
main = command(run, _FLAGS)
