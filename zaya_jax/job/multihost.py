"""Multi-host jobs: join the processes, and exchange values between them before training starts."""

import contextlib
import importlib.util
import itertools
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax

from zaya_jax.errors import ExitCode, InputError, Reason, RunStopped, exit_message, exit_reason
from zaya_jax.hardware.presets import HEARTBEAT_MARGIN
from zaya_jax.job.jax_internals import detect_job, key_value_store, share_compilation_cache
from zaya_jax.job.peer_liveness import PeerLiveness
from zaya_jax.job.relay import private_address, relay
from zaya_jax.job.rendezvous import Job, connect_processes, list_processes
from zaya_jax.run.digests import digest
from zaya_jax.run.launcher import detect_launcher, split_address
from zaya_jax.run.progress_record import ProgressRecord

T = TypeVar("T")
# Values that processes may exchange. Tuples and enums would arrive as lists and plain values.
Json = TypeVar("Json", bound=bool | int | float | str | list[Any] | dict[str, Any] | None)

Flags = tuple[str | None, int | None, int | None]  # --coordinator, --processes, --process
# Words in jax's errors that mean another process failed.
_PEER_ERRORS = ("gloo", "nccl", "rccl", "unavailable", "deadline_exceeded", "heartbeat", "connection")
_PATIENCE = 600  # seconds that processes may take to load their configuration
# Number of messages sent on each topic. All processes send the same messages in the same order, so these agree.
_turns: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def join(
    flags: Flags, seconds: int, peer_timeout: float, progress: ProgressRecord | None = None, folder: Path | None = None
) -> PeerLiveness | None:
    """Join the job that this process belongs to; return the thread that watches its peers, or None if it is alone.

    The launcher tells the coordinator (HOST:PORT of process 0), the number of processes and the index of this one,
    unless all three `flags` are given. The others have `seconds` to connect. Later, one that is silent for
    `peer_timeout` seconds ends this process, with an exit record in `progress`. A `folder` that all processes share, or
    the user's cache, hands on the secret of the job. `InputError` if only some of the flags are given, one is invalid,
    or `connect_processes` fails.
    """
    if (job := _find_job(flags, seconds)) is None:
        return None
    job = job._replace(folder=folder)
    connections = connect_processes(job, seconds)
    peers = PeerLiveness(connections, peer_timeout, progress) if connections else None
    jax.config.update("jax_check_proxy_envs", False)  # its service is not called over the network
    jax.config.update("jax_enable_preemption_service", False)  # `StopStep` takes its place
    share_compilation_cache()
    try:
        with private_address() as path:
            for tunnel in [peer.tunnel for peer in connections if peer.tunnel is not None]:
                relay(tunnel, path, is_service_here=job.process == 0)
            jax.distributed.initialize(
                f"unix:{path}",
                job.processes,
                job.process,
                coordinator_bind_address=f"unix:{path}",
                initialization_timeout=seconds + HEARTBEAT_MARGIN,
                heartbeat_timeout_seconds=math.ceil(peer_timeout) + HEARTBEAT_MARGIN,
                shutdown_timeout_seconds=math.ceil(peer_timeout),
            )
    except (RuntimeError, ValueError) as error:
        refused = _unusable(job.coordinator, error)
        if peers is not None:
            peers.leave(*exit_message(refused))
        raise refused from error
    return peers


def _find_job(flags: Flags, seconds: int) -> Job | None:
    if flags != (None, None, None) and None in flags:
        together = "--coordinator, --processes and --process must be given together"
        raise InputError(f"{together}, or none where a launcher sets them. Add the missing ones.")
    (coordinator, processes, process), source = flags, "--coordinator"
    if coordinator is None:
        if (name := detect_launcher(os.environ)) is None:
            return None
        if name == "Kubernetes" and importlib.util.find_spec("kubernetes") is None:
            remedy = "pip install 'jax[k8s]', or pass --coordinator, --processes and --process as launch/jobset.yaml"
            raise InputError(f"The pods of this job need the package kubernetes to find each other: {remedy}.")
        source = f"{name}'s coordinator"
        try:
            coordinator, processes, process = detect_job(seconds)
        except Exception as error:  # invalid variables of a launcher, or an error of the Kubernetes API
            raise _unusable(source, error) from error
    host, port = split_address(coordinator or "", source)
    if processes is None or process is None or processes < 1 or not 0 <= process < processes:
        raise InputError(f"--process is {process}, but must be at least 0 and below --processes {processes}.")
    return Job(host, port, source, processes, process)


def _unusable(subject: str, error: Exception) -> InputError:
    return InputError(f"{subject} cannot be used: {(str(error).splitlines() or [type(error).__name__])[0][:200]}")


def is_primary() -> bool:
    """True if this is process 0, which writes files and prints."""
    return jax.process_index() == 0


def broadcast(value: Json) -> Json:
    """Return process 0's `value`, after a round trip through JSON; waits for as long as process 0 takes.

    It uses the coordinator's key-value store, since a collective would time out while process 0 prepares data.
    """
    text = json.dumps(value)
    if jax.process_count() == 1:
        return json.loads(text)
    key = f"zaya_jax/broadcast/{next(_turns['broadcast'])}"
    if is_primary():
        key_value_store().key_value_set(key, text)
    while True:  # `PeerLiveness` ends this process if process 0 is lost
        with contextlib.suppress(TimeoutError):
            return _receive(key, 10)


def all_gather(topic: str, value: Json, seconds: float) -> list[Json]:
    """Return the `value` of every process, after a round trip through JSON, in the order of processes.

    The `topic` separates the messages of different threads, whose order may differ between processes. `TimeoutError`
    names a process that did not send its value within `seconds`.
    """
    text = json.dumps(value)
    if jax.process_count() == 1:
        return [json.loads(text)]
    key, deadline = f"zaya_jax/{topic}/{next(_turns[topic])}", time.monotonic() + seconds
    key_value_store().key_value_set(f"{key}/{jax.process_index()}", text)
    values = []
    for process in range(jax.process_count()):
        try:
            values.append(_receive(f"{key}/{process}", deadline - time.monotonic()))
        except TimeoutError as error:
            raise TimeoutError(f"Process {process} did not answer within {seconds:g} s.") from error
    return values


def _receive(key: str, seconds: float) -> Any:
    """Wait for a message; `TimeoutError` if it does not arrive."""
    try:
        return json.loads(key_value_store().blocking_key_value_get(key, max(1, round(1000 * seconds))))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        raise TimeoutError from error


def primary_first(action: Callable[[], T]) -> T:
    """Run `action` in process 0, then in all others, which can use the files it wrote.

    All raise the `InputError` that process 0 raises; if it fails for another reason, the others raise `RunStopped`.
    """
    if jax.process_count() == 1:
        return action()
    if not is_primary():
        failure: list[Any] | None = broadcast(None)
        if failure is None:
            return action()
        problem, status, reason = failure
        raise (InputError if status == ExitCode.BAD_INPUT else RunStopped)(problem, Reason(reason))
    try:
        result = action()
    except Exception as error:
        sentence, status = exit_message(error)
        broadcast([sentence.partition(": ")[2] or type(error).__name__, status, exit_reason(error)])
        raise
    broadcast(None)
    return result


def check_alike(text: str) -> None:
    """Raise `InputError` in every process unless all have the same configuration `text`."""
    digests = all_gather("config", digest(text.encode()), _PATIENCE)
    if differing := [process for process, own in enumerate(digests) if own != digests[0]]:
        have = f"of {len(digests)} {'has' if len(differing) == 1 else 'have'} a different configuration from process 0"
        raise InputError(f"{list_processes(differing)} {have}. Start all with the same files and overrides.")


def is_peer_loss(error: Exception) -> bool:
    """True if `error` was caused by another process of the job that is lost or cannot be reached."""
    is_from_jax = isinstance(error, jax.errors.JaxRuntimeError) and jax.process_count() > 1
    return is_from_jax and any(word in str(error).lower() for word in _PEER_ERRORS)
