"""Multi-host jobs: join the processes, and exchange values between them before training starts."""

import hashlib
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
from jax._src import clusters, distributed

from zaya_jax.errors import ExitCode, InputError, Reason, RunStopped, exit_message, exit_reason
from zaya_jax.hardware.presets import HEARTBEAT_MARGIN
from zaya_jax.job.compilation_cache import share_compilation_cache
from zaya_jax.job.peer_liveness import PeerLiveness
from zaya_jax.job.relay import private_address, relay
from zaya_jax.job.rendezvous import Job, connect_processes, split_address
from zaya_jax.run.launcher import detect_launcher
from zaya_jax.run.progress_record import ProgressRecord

T = TypeVar("T")
# Values that processes may exchange. Tuples and enums would arrive as lists and plain values.
Json = TypeVar("Json", bound=bool | int | float | str | list[Any] | dict[str, Any] | None)

# Words in jax's errors that mean another process failed.
_PEER_ERRORS = ("gloo", "nccl", "rccl", "unavailable", "deadline_exceeded", "heartbeat", "connection")
_PATIENCE = 600  # seconds that processes may take to load their configuration
# Number of messages sent on each topic. All processes send the same messages in the same order, so these agree.
_turns: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def join(
    coordinator: str | None, processes: int | None, process: int | None, join_seconds: int, peer_timeout: float,
    progress: ProgressRecord | None = None, folder: Path | None = None,
) -> PeerLiveness | None:  # fmt: skip
    """Join the job that this process belongs to, and start to watch its peers.

    Args:
      coordinator: HOST:PORT of process 0. None, with `processes` and `process`, to ask the launcher.
      processes: number of processes in the job.
      process: index of this process.
      join_seconds: seconds to wait for the other processes.
      peer_timeout: seconds that another process may be silent before this one ends; above 0.
      progress: receives the exit record if the loss of another process ends this one; None for no record.
      folder: that all processes share, to hand on the secret of the job; None for the user's cache.

    Returns:
      The liveness thread; None if this process is alone.

    Raises:
      InputError: only some of the three are given, one is invalid, or `connect_processes` fails.
    """
    flags = (coordinator, processes, process)
    if flags != (None, None, None) and None in flags:
        raise InputError("--coordinator, --processes and --process must be given together. Add the missing ones, or "
                         "omit all three where a launcher sets them.")  # fmt: skip
    name = detect_launcher(os.environ)
    if coordinator is None and name is None:
        return None
    if coordinator is None and name == "Kubernetes" and importlib.util.find_spec("kubernetes") is None:
        raise InputError("The pods of this indexed Kubernetes job need the package kubernetes to find each other. "
                         "Install it with pip install 'jax[k8s]', or pass --coordinator, --processes and --process, as "
                         "launch/jobset.yaml does.")  # fmt: skip
    source = "--coordinator" if coordinator is not None else f"{name}'s coordinator"
    try:
        if coordinator is None or processes is None or process is None:
            coordinator, processes, process, _ = clusters.ClusterEnv.auto_detect_unset_distributed_params(
                os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, None, None, join_seconds
            )
    except Exception as error:  # invalid variables of a launcher, or an error of the Kubernetes API
        raise _unusable(source, error) from error
    job = _job(coordinator, processes, process, source)._replace(folder=folder)
    connections = connect_processes(job, join_seconds)
    peers = PeerLiveness(connections, peer_timeout, progress) if connections else None
    jax.config.update("jax_check_proxy_envs", False)  # its service is not called over the network
    jax.config.update("jax_enable_preemption_service", False)  # `StopStep` takes its place
    share_compilation_cache()
    try:
        with private_address() as path:
            for tunnel in [peer.tunnel for peer in connections if peer.tunnel is not None]:
                relay(tunnel, path, is_service_here=job.process == 0)
            jax.distributed.initialize(
                f"unix:{path}", job.processes, job.process, coordinator_bind_address=f"unix:{path}",
                initialization_timeout=join_seconds + HEARTBEAT_MARGIN,
                heartbeat_timeout_seconds=math.ceil(peer_timeout) + HEARTBEAT_MARGIN,
                shutdown_timeout_seconds=math.ceil(peer_timeout),
            )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        refused = _unusable(job.coordinator, error)
        if peers is not None:
            peers.leave(*exit_message(refused))
        raise refused from error
    return peers


def _unusable(what: str, error: Exception) -> InputError:
    return InputError(f"{what} cannot be used: {(str(error).splitlines() or [type(error).__name__])[0][:200]}")


def _job(coordinator: str | None, processes: int | None, process: int | None, source: str) -> Job:
    host, port = split_address(coordinator or "", source)
    if processes is None or process is None or processes < 1 or not 0 <= process < processes:
        raise InputError(f"--process is {process}, but must be at least 0 and below --processes {processes}.")
    return Job(host, port, source, processes, process)


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
        _store().key_value_set(key, text)
        return json.loads(text)
    while True:  # `PeerLiveness` ends this process if process 0 is lost
        try:
            return json.loads(_store().blocking_key_value_get(key, 10_000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def all_gather(topic: str, value: Json, seconds: float) -> list[Json]:
    """Return the `value` of every process, after a round trip through JSON, in the order of processes.

    Args:
      topic: separates the messages of different threads, whose order may differ between processes.
      value: value of this process.
      seconds: how long to wait for the others.

    Raises:
      TimeoutError: another process did not send its value in time; the message names it.
    """
    text = json.dumps(value)
    if jax.process_count() == 1:
        return [json.loads(text)]
    key, deadline = f"zaya_jax/{topic}/{next(_turns[topic])}", time.monotonic() + seconds
    _store().key_value_set(f"{key}/{jax.process_index()}", text)
    values = []
    for process in range(jax.process_count()):
        left = max(1, round(1000 * (deadline - time.monotonic())))
        try:
            values.append(json.loads(_store().blocking_key_value_get(f"{key}/{process}", left)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise TimeoutError(f"Process {process} did not answer within {seconds:g} s.") from error
    return values


def primary_first(action: Callable[[], T]) -> T:
    """Run `action` in process 0, then in all others, which can use the files it wrote.

    Raises:
      InputError: process 0 raised it; every process raises the same.
      RunStopped: in the others, if process 0 failed for another reason, such as a full disk.
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
    digests = all_gather("config", hashlib.sha256(text.encode()).hexdigest(), _PATIENCE)
    if differing := [str(process) for process, digest in enumerate(digests) if digest != digests[0]]:
        several = len(differing) > 1
        raise InputError(f"Process{'es' if several else ''} {', '.join(differing)} of {len(digests)} "
                         f"{'have' if several else 'has'} a different configuration from process 0. Start all "
                         "processes with the same files and overrides.")  # fmt: skip


def _store() -> Any:
    """Return the coordinator's key-value store, for which jax has no public API."""
    return distributed.global_state.client


def is_peer_loss(error: Exception) -> bool:
    """True if `error` was caused by another process of the job that is lost or cannot be reached."""
    text = str(error).lower()
    return (isinstance(error, jax.errors.JaxRuntimeError) and jax.process_count() > 1
            and any(word in text for word in _PEER_ERRORS))  # fmt: skip
