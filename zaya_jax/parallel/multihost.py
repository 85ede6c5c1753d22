"""Several processes as one job: how they find each other, and how they agree before anything is begun."""

import hashlib
import importlib.util
import itertools
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from jax._src import clusters, distributed

from zaya_jax.errors import ExitCode, InputError, RunStopped, last_words
from zaya_jax.parallel.peer_liveness import PeerLiveness
from zaya_jax.parallel.relay import relay
from zaya_jax.parallel.rendezvous import Job, meet, split_address
from zaya_jax.run.launcher import detect_launcher

T = TypeVar("T")
# What processes may send: a tuple or an enum would arrive as what JSON makes of it.
Json = TypeVar("Json", bound=bool | int | float | str | list[Any] | dict[str, Any] | None)

_HEARTBEAT_MARGIN = 30  # seconds that jax's heartbeats are given beyond our own
# In jax's errors, what tells one of the others from one of our own.
_PEER_ERRORS = ("gloo", "nccl", "rccl", "unavailable", "deadline_exceeded", "heartbeat", "connection")
_PATIENCE = 600  # seconds for the processes, which have met, to load their configuration
# Of each topic, the messages sent so far: the same in all processes, which send them in the same order.
_turns: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def join(
    coordinator: str | None, processes: int | None, process: int | None, join_seconds: int, peer_timeout: float
) -> PeerLiveness | None:
    """Join the job this process belongs to, and watch its peers; nothing, and None, where it is alone.

    Args:
      coordinator: HOST:PORT of process 0; with `processes` and `process`, or all three left to the launcher.
      processes: of the job.
      process: this one's number.
      join_seconds: how long to wait for the other processes.
      peer_timeout: how long another process may go unheard before this one ends; above zero.

    Raises:
      InputError: only some of the three are given, or cannot be; or the processes do not meet, see `meet`.
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
    except Exception as error:  # of a launcher's variables, or of the Kubernetes API
        raise _unusable(source, error) from error
    job = _job(coordinator, processes, process, source)
    connections = meet(job, join_seconds)
    peers = PeerLiveness(connections, peer_timeout) if connections else None
    # The processes have reached each other directly, where gRPC would ask the proxy of http_proxy. Its variables are
    # in lower case.
    direct = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy", "")  # noqa: SIM112
    os.environ["no_grpc_proxy"] = f"{direct},127.0.0.1,{job.host}"  # noqa: SIM112
    jax.config.update("jax_check_proxy_envs", False)  # which would warn of the line before
    try:
        jax.distributed.initialize(
            relay(job.host, job.port) if job.process else job.address, job.processes, job.process,
            initialization_timeout=join_seconds + _HEARTBEAT_MARGIN,
            heartbeat_timeout_seconds=math.ceil(peer_timeout) + _HEARTBEAT_MARGIN,
            shutdown_timeout_seconds=math.ceil(peer_timeout),
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        refused = _unusable(job.coordinator, error)
        if peers is not None:
            peers.leave(*last_words(refused))
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
    """Whether this is the process that writes and speaks for all."""
    return jax.process_index() == 0


def broadcast(value: Json) -> Json:
    """The `value` of process 0 in every process, as JSON has it there, however long it takes to be sent.

    By the coordinator's store: a collective would give up while process 0 prepares data.
    """
    text = json.dumps(value)
    if jax.process_count() == 1:
        return json.loads(text)
    key = f"zaya_jax/broadcast/{next(_turns['broadcast'])}"
    if is_primary():
        _store().key_value_set(key, text)
        return json.loads(text)
    while True:  # `PeerLiveness` ends this process where process 0 is lost
        try:
            return json.loads(_store().blocking_key_value_get(key, 10_000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def all_gather(topic: str, value: Json, seconds: float) -> list[Json]:
    """The `value` of each process, as JSON has it, in the order of processes.

    Args:
      topic: tells messages of one thread from those of others, which may be sent in another order.
      value: of this process.
      seconds: to wait for the others.

    Raises:
      TimeoutError: another process did not send its value in time; it is named.
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
    """`action` in process 0, then in the others, which see what it has made.

    Raises:
      InputError: that of process 0, in every process.
      RunStopped: in the others, where process 0 fails for another reason, such as a full disk.
    """
    if jax.process_count() == 1:
        return action()
    if not is_primary():
        failure: list[Any] | None = broadcast(None)
        if failure is None:
            return action()
        problem, status = failure
        raise (InputError if status == ExitCode.BAD_INPUT else RunStopped)(problem)
    try:
        result = action()
    except Exception as error:
        sentence, status = last_words(error)
        broadcast([sentence.partition(": ")[2] or type(error).__name__, status])
        raise
    broadcast(None)
    return result


def check_alike(text: str) -> None:
    """Raise `InputError` in every process unless all were given the same configuration `text`."""
    digests = all_gather("config", hashlib.sha256(text.encode()).hexdigest(), _PATIENCE)
    if differing := [str(process) for process, digest in enumerate(digests) if digest != digests[0]]:
        several = len(differing) > 1
        raise InputError(f"Process{'es' if several else ''} {', '.join(differing)} of {len(digests)} "
                         f"{'have' if several else 'has'} another configuration than process 0. Start all processes "
                         "with the same files and overrides.")  # fmt: skip


def _store() -> Any:
    """The coordinator's key-value store, for which jax has no public name."""
    return distributed.global_state.client


def is_peer_loss(error: Exception) -> bool:
    """Whether `error`, in a job of several processes, comes of another that is lost or cannot be reached."""
    text = str(error).lower()
    return (isinstance(error, jax.errors.JaxRuntimeError) and jax.process_count() > 1
            and any(word in text for word in _PEER_ERRORS))  # fmt: skip
