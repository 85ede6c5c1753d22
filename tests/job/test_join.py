"""What a process is told that cannot join its job."""

import socket

import jax
import pytest

from zaya_jax.errors import InputError
from zaya_jax.job.multihost import is_peer_loss, join

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("node1:1", None, None), "must be given together"),
        (("node1", 2, 0), "must be HOST:PORT"),
        (("node1:port", 2, 0), "must be HOST:PORT"),
        (("node1:99999", 2, 0), "must be HOST:PORT"),
        (("node1:1", 2, 2), "--process is 2, but .* --processes 2"),
        (("node1:1", 0, 0), "--process is 0, but .* --processes 0"),
    ],
)
def test_flags_that_cannot_be_are_refused(flags, message):
    with pytest.raises(InputError, match=message):
        join(flags, seconds=1, peer_timeout=1)


def test_a_pod_that_cannot_find_the_others_is_not_left_to_train_alone(monkeypatch):
    for name, value in POD.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=r"need the package kubernetes .* pass --coordinator"):
        join((None, None, None), seconds=1, peer_timeout=1)


def test_the_coordinator_of_a_launcher_is_named_with_what_changes_its_port(monkeypatch):
    slurm = {"JOB_ID": "1", "STEP_NODELIST": "127.0.0.1,node2", "NTASKS": "2", "PROCID": "0", "LOCALID": "0"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv("JAX_COORDINATOR_PORT", str(port))
        with pytest.raises(
            InputError, match=rf"at Slurm's coordinator 127\.0\.0\.1:{port}: .* \(JAX_COORDINATOR_PORT\)"
        ):
            join((None, None, None), seconds=1, peer_timeout=1)


def test_alone_nothing_is_lost():
    assert not is_peer_loss(RuntimeError("of another kind"))
    assert not is_peer_loss(jax.errors.JaxRuntimeError("of one process"))
