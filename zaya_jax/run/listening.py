"""Listen where the other processes of a job look for this one, once the address is up."""

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from zaya_jax.errors import InputError, PeersMissing
from zaya_jax.run.signals import warn_once

BIND = "JAX_COORDINATOR_BIND_ADDRESS"
BIND_INSTEAD = f"set {BIND} to an ADDRESS:PORT of this host"
_RETRY = 0.2  # seconds
_BUSY = 10.0  # seconds that a name server may be busy


def resolve(host: str, named: str, start: float, seconds: float) -> list[str]:
    """Return the addresses of a host, `named` in messages; `InputError` if its name cannot be resolved.

    `start` and `seconds` say, in `time.monotonic`, how long the name may be missing on Kubernetes.
    """
    while True:
        try:
            addresses: list[Any] = [info[4] for info in socket.getaddrinfo(host, None)]  # IPv6: with a scope at the end
            return list(dict.fromkeys(f"{ip}%{rest[2]}" if any(rest[2:]) else str(ip) for ip, *rest in addresses))
        except socket.gaierror as error:
            # Kubernetes registers a pod's name only once it is scheduled; a name server may be busy for a moment.
            late = seconds if "KUBERNETES_SERVICE_HOST" in os.environ else _BUSY * (error.errno == socket.EAI_AGAIN)
            if time.monotonic() >= start + late:
                problem = f"The host of {named} could not be resolved ({error.strerror})"
                raise PeersMissing(f"{problem}. Correct the name, or use an IP address.") from error
        except UnicodeError as error:  # a name that the idna codec cannot encode
            must = "each part between dots must have 1 to 63 characters"
            raise InputError(f"{named} has an invalid host name: {must}.") from error
        time.sleep(_RETRY)


def listen(
    who: str, host: str, named: str, start: float, seconds: float, open_at: Callable[[str], socket.socket | None]
) -> list[socket.socket]:
    """Listen as `who` at the addresses of a host, `named` in messages, that this machine has.

    `open_at` opens a listener at an address, see `open_listener`. `PeersMissing` if this machine has none of them for
    `seconds` after `start`.
    """
    while True:
        addresses = resolve(host, named, start, seconds)
        if listeners := [each for each in map(open_at, addresses) if each is not None]:
            is_local = all(address == "::1" or address.startswith("127.") for address in addresses)
            if is_local and host not in (*addresses, "localhost"):
                problem = f"{host} is {' and '.join(addresses)} on this host, which other hosts cannot reach"
                warn_once(f"{problem}. If the job has others, {BIND_INSTEAD}.")
            return listeners
        # A name may still lead to the host of an earlier start, and an address may come up late.
        problem = f"{who} cannot listen at {named}: {host} is no address of this host"
        warn_once(f"{problem} yet. It tries again for {seconds:g} s.")
        if time.monotonic() >= start + seconds:
            raise PeersMissing(
                f"{problem}. Start {who[:1].lower()}{who[1:]} there. If the address is translated, {BIND_INSTEAD}."
            )
        time.sleep(_RETRY)


def open_listener(address: str, port: int) -> socket.socket | None:
    """Listen at an address; None if this host does not have it, as ::1 of localhost without IPv6."""
    family, backlog = socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOMAXCONN
    try:
        return socket.create_server((address, port), family=family, backlog=backlog, dualstack_ipv6=address == "::")
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            return None
        raise


@contextlib.contextmanager
def reserved_port() -> Iterator[str]:
    """Yield HOST:PORT of the loopback interface, where a process that knows it can listen during the block."""
    with socket.socket() as bound:
        # The system gives a bound port to nobody who asks for any; who names it can share it, unless one listens.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        yield "{}:{}".format(*bound.getsockname())
