"""Copies of checkpoints and of compiled programs that the nodes of a job send each other, so that a spare is ready.

Every node serves what it has, and gets compiled programs from node 0, since jax keeps those of process 0 alone. A
spare, and a node that replaces another, get the parts of the newest checkpoint from the copies of all nodes. The shared
storage is asked for the list of parts and their digests alone, and each part is compared with its digest.
"""

import contextlib
import errno
import io
import json
import math
import os
import re
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from zaya_jax.aegis.transfer import Transfer
from zaya_jax.config import Config
from zaya_jax.errors import InputError
from zaya_jax.hardware.environment import keep_compilations
from zaya_jax.run.checkpoints import CHECKPOINTS, saved_steps
from zaya_jax.run.digests import new_digest, read_slice
from zaya_jax.run.files import LONGEST_JSON, expanded, open_regular
from zaya_jax.run.handshake import Strangers, exchange_proofs
from zaya_jax.run.local_copies import copies_folder, part_file, remove_other_steps
from zaya_jax.run.manifest import read_digests, read_manifest
from zaya_jax.run.peer import Peer
from zaya_jax.run.signals import warn_once
from zaya_jax.run.writing import make_folder, new_file, private_folder, resolved

_EVERY = 1.0  # seconds between two looks at the newest checkpoint
_COMPILED_EVERY = 5.0  # seconds between two looks at the compiled programs of node 0
_CONNECT = 5.0  # seconds that connecting and the proofs may take
_PATIENCE = 10.0  # seconds that a stranger's proof may take
_MOST_CONNECTIONS = 16  # of other nodes at a time
_THREADS = 4  # nodes that are asked at a time
_MOST_COMPILED = 2**31  # bytes of compiled programs
_PART = re.compile(r"[0-9a-f]{32}")
_PROGRAM = re.compile(r"[\w-][\w.-]{0,254}", re.ASCII)
_CHUNK = 2**20  # bytes


class Copies:
    """Serves the copies on this node, and gets those that it lacks, in threads that end with the process."""

    def __init__(self, config: Config) -> None:
        """Use the folders that the trainer of `config` uses."""
        self._checkpoints = resolved(expanded(config.run_dir) / CHECKPOINTS)
        self._local = config.checkpoint.local_dir
        environment = dict(os.environ)
        keep_compilations(environment)
        compiled = environment.get("JAX_COMPILATION_CACHE_DIR")
        self._compiled = expanded(compiled) if compiled else None
        self._secret, self._selector = "", selectors.DefaultSelector()
        self._strangers = Strangers(self._selector, "", self._admit)  # nobody can connect yet
        self._peers, self._copies_checkpoint, self._has_rank = list[str](), False, False
        self._target: int | None = None  # step of which this node has begun to get a copy
        self._missing: dict[str, tuple[int, str]] | None = None  # parts of it: file → bytes, digest
        self._damaged: set[tuple[str, str]] = set()  # node and part of it, not to be asked for again
        self._connections = threading.Semaphore(_MOST_CONNECTIONS)
        self.address = ""  # where this node serves, HOST:PORT
        self.newest: int | None = None  # step of the newest checkpoint when this node last had no rank
        self.held: int | None = None  # the step of which this node holds all parts, verified

    def start(self, host: str, secret: str) -> None:
        """Serve at this address of the node, and get what is missing from now on; later calls change the secret."""
        self._secret = self._strangers.secret = secret
        if self.address:
            return
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=_MOST_CONNECTIONS)
        self.address = f"{host}:{listener.getsockname()[1]}"
        for work in (lambda: self._serve(listener), self._keep_getting):
            threading.Thread(target=work, name="copies", daemon=True).start()

    def follow(self, peers: Sequence[str], *, copies: bool, has_rank: bool) -> None:
        """Get compiled programs from the first of these nodes, and with `copies` the newest checkpoint from all.

        A node that `has_rank` writes its own copies from then on.
        """
        self._peers, self._copies_checkpoint, self._has_rank = list(peers), copies, has_rank
        if has_rank and not copies:  # its trainer replaces what it has
            self._target = self.held = None

    # What this node serves

    def _serve(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._strangers.accept)
        while True:
            for key, _ in self._selector.select(1.0):
                key.data(key.fileobj)
            self._strangers.drop_late(_PATIENCE)

    def _admit(self, peer: Peer, hello: Mapping[str, Any], key: str) -> None:
        del hello
        if self._connections.acquire(blocking=False):
            threading.Thread(target=self._answer, args=(peer.connection, key), name="copies", daemon=True).start()
        else:
            peer.close()  # it will try again

    def _answer(self, connection: socket.socket, key: str) -> None:
        try:
            with connection, contextlib.suppress(OSError, ValueError, TypeError):
                transfer = Transfer(connection, key)
                while True:
                    transfer.answer(self._find)
        finally:
            self._connections.release()

    def _find(self, request: Mapping[str, Any]) -> tuple[IO[bytes], int] | None:
        """Open what another node asks for: a part or a compiled program, or without `file` the list of them."""
        step, file = request.get("step"), request.get("file")
        home = self._compiled if step is None else self._home / str(int(step))
        pattern = _PROGRAM if step is None else _PART
        try:
            if home is None:
                return None
            if file is None:
                listed = [name for name in os.listdir(home) if pattern.fullmatch(name)]
                content = json.dumps(_newest(home, listed) if step is None else listed).encode()
                return io.BytesIO(content), len(content)
            if not pattern.fullmatch(file):
                return None
            opened = open_regular(home / file)
            return opened, os.fstat(opened.fileno()).st_size
        except OSError:
            return None

    @property
    def _home(self) -> Path:
        if self._local is None:
            raise OSError("checkpoint.local_dir is null")
        return copies_folder(self._local, self._checkpoints)

    # What this node gets

    def _keep_getting(self) -> None:
        looked = -math.inf
        while True:
            time.sleep(_EVERY)
            try:
                if self._copies_checkpoint and (not self._has_rank or self.newest is None):
                    self.newest = max(saved_steps(self._checkpoints), default=None)
                if self._peers and self._copies_checkpoint and self._local is not None and self.newest is not None:
                    self._get_checkpoint(self._local, self.newest)
                if self._peers and self._compiled is not None and time.monotonic() > looked + _COMPILED_EVERY:
                    looked = time.monotonic()
                    self._get_compiled(self._compiled)
            except (OSError, InputError, ValueError, TypeError, LookupError) as error:
                warn_once(f"Copies of other nodes cannot be used yet: {getattr(error, 'strerror', None) or error}.")

    def _get_checkpoint(self, local_dir: str, step: int) -> None:
        """Get the missing parts of a checkpoint, which those who have them may not have written yet."""
        if step != self._target:
            self._target, self._missing, self._damaged = step, None, set()
        if self._missing == {}:
            return
        with private_folder(copies_folder(local_dir, self._checkpoints)) as home:
            folder = home / str(step)
            folder.mkdir(exist_ok=True)
            if self._missing is None:
                self._missing = self._list_missing(step, folder)
            missing, before = self._missing, len(self._missing)
            with ThreadPoolExecutor(_THREADS, "copies") as pool:
                list(pool.map(lambda peer: self._get_parts(peer, step, folder, missing), self._peers))
            if not missing:
                self.held = step
                if not self._has_rank:
                    remove_other_steps(home, step)
            elif self._has_rank and len(missing) == before:  # nobody has the rest
                self._missing = {}

    def _list_missing(self, step: int, folder: Path) -> dict[str, tuple[int, str]]:
        checkpoint = self._checkpoints / str(step)
        manifest = read_manifest(checkpoint)
        if not (digests := read_digests(checkpoint, manifest)):
            raise InputError(f"{checkpoint} has no checksums, so a copy of it cannot be verified")
        missing = {}
        for name, parts in digests.items():
            bits = re.search(r"\d+", manifest.leaves[name]["dtype"])  # bool has one byte
            for span, text in parts.items():
                elements = math.prod(axis.stop - axis.start for axis in read_slice(span))
                missing[part_file(name, span)] = elements * int(bits[0] if bits else 8) // 8, text
        return {file: part for file, part in missing.items() if not _is_intact(folder / file, *part)}

    def _get_parts(self, peer: str, step: int, folder: Path, missing: dict[str, tuple[int, str]]) -> None:
        """Get from a node the parts that it has and nobody else is sending."""
        try:
            with self._connect(peer) as transfer:
                for file in transfer.ask_json({"step": step}, LONGEST_JSON) or ():
                    if (peer, file) in self._damaged or (part := missing.pop(file, None)) is None:
                        continue
                    is_right = False
                    try:
                        is_right = self._get_part(transfer, {"step": step, "file": file}, folder / file, *part)
                    finally:
                        if not is_right:
                            missing[file] = part  # another node may have it
                    if not is_right:
                        self._damaged.add((peer, file))
                        copy = f"The copy of a part of the checkpoint of step {step} on {peer} is damaged"
                        warn_once(f"{copy}. Other nodes are asked for it, and then the shared storage.")
        except (OSError, ValueError, TypeError) as error:  # it may have ended, or replaced this checkpoint
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                warn_once(f"checkpoint.local_dir ({self._local}) has no space for a whole checkpoint.")

    def _get_part(self, transfer: Transfer, request: Mapping[str, Any], path: Path, size: int, text: str) -> bool:
        """Get a part; False if it is not what the checkpoint has a digest of."""
        partial = path.with_suffix(".partial")
        try:
            with partial.open("wb") as file:
                if not transfer.ask(request, file.write, size):
                    raise FileNotFoundError(path)  # a newer checkpoint has replaced it
            if is_right := _is_intact(partial, size, text):
                partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        return is_right

    def _get_compiled(self, folder: Path) -> None:
        make_folder(folder)
        with self._connect(self._peers[0]) as transfer:
            left = _MOST_COMPILED
            for name, size in transfer.ask_json({"step": None}, LONGEST_JSON) or ():
                left -= size
                if not _PROGRAM.fullmatch(name) or size < 0 or left < 0 or (folder / name).exists():
                    continue
                with contextlib.suppress(FileNotFoundError), new_file(folder / name, sync=False) as file:
                    if not transfer.ask({"step": None, "file": name}, file.write, size):
                        raise FileNotFoundError(name)

    @contextlib.contextmanager
    def _connect(self, peer: str) -> Iterator[Transfer]:
        host, _, port = peer.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=_CONNECT) as connection:
            key = exchange_proofs(connection, lambda: self._secret, {}, time.monotonic() + _CONNECT)
            yield Transfer(connection, key)


def _newest(folder: Path, names: Sequence[str]) -> list[tuple[str, int]]:
    """Return names and sizes of files, the newest first."""
    programs = []
    for name in names:
        with contextlib.suppress(OSError):
            status = os.stat(folder / name)
            if time.time() - status.st_mtime > _COMPILED_EVERY:  # so jax does not write it any more
                programs.append((status.st_mtime, name, status.st_size))
    return [(name, size) for _, name, size in sorted(programs, reverse=True)]


def _is_intact(path: Path, size: int, text: str) -> bool:
    """Return whether a file has this size and digest."""
    computed = new_digest()
    with contextlib.suppress(OSError), open_regular(path) as file:
        if os.fstat(file.fileno()).st_size == size:
            while chunk := file.read(_CHUNK):
                computed.update(chunk)
            return computed.hexdigest() == text
    return False
