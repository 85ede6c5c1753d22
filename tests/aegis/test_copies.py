"""Copies between nodes: what arrives is what the checkpoint has digests of, whoever sends what."""

import contextlib
import io
import json
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.test_local import largest, restored, save, used
from tests.checkpoint.test_restore import flip
from zaya_jax.aegis import copies, transfer
from zaya_jax.aegis.copies import Copies
from zaya_jax.aegis.transfer import Transfer
from zaya_jax.config import load_config
from zaya_jax.run.checkpoints import CHECKPOINTS
from zaya_jax.run.handshake import exchange_proofs
from zaya_jax.run.job_secret import prove

assert used  # a fixture
SECRET = secrets.token_hex()


@pytest.fixture
def node(tmp_path, monkeypatch) -> Callable[[str], Copies]:
    """Make a node of a run in `tmp_path/run`, with private folders, that serves on loopback."""
    monkeypatch.setattr(copies, "_EVERY", 0.05)

    def make(name: str) -> Copies:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / name / "compiled"))
        (tmp_path / name / "compiled").mkdir(parents=True)
        made = Copies(
            load_config("configs/tiny.yaml", [f"run_dir={tmp_path}", f"checkpoint.local_dir={tmp_path / name}"])
        )
        made.start("127.0.0.1", SECRET)
        return made

    return make


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def save_on(folder: Path, name: str, steps=(1,)) -> None:
    save(folder, steps, run=CHECKPOINTS, node=name)


def copy_on(folder: Path, name: str, step: int) -> Path:
    (copied,) = (folder / name).glob(f"[0-9a-f]*/{step}")
    return copied


def test_a_spare_follows_the_newest_checkpoint_and_restores_it_without_the_shared_storage(tmp_path, node, used):
    first, spare = node("a"), node("b")
    spare.follow([first.address], copies=True, has_rank=False)
    for step in (1, 2):
        save_on(tmp_path, "a", [step])
        until(lambda step=step: spare.held == step)
    assert [path.name for path in copy_on(tmp_path, "b", 2).parent.iterdir()] == ["2"]
    assert restored(tmp_path, run=CHECKPOINTS, node="b") == 2
    assert used == []


def test_a_damaged_copy_is_named_and_replaced_by_that_of_another_node_or_the_shared_storage(
    tmp_path, node, used, capsys
):
    first, second, spare = node("a"), node("c"), node("b")
    save_on(tmp_path, "a")
    flip(largest(copy_on(tmp_path, "a", 1)), 5)
    spare.follow([first.address], copies=True, has_rank=True)
    until(lambda: spare._missing == {})  # it has given up
    assert spare.held is None
    assert f"on {first.address} is damaged" in capsys.readouterr().err
    assert restored(tmp_path, run=CHECKPOINTS, node="b") == 1
    assert [len(names) for names in used] == [1]
    save_on(tmp_path, "c", [2])
    (tmp_path / "a" / copy_on(tmp_path, "c", 2).parent.name / "2").symlink_to(copy_on(tmp_path, "c", 2))
    spare.follow([first.address, second.address], copies=True, has_rank=False)
    until(lambda: spare.held == 2)


def test_only_copies_and_compiled_programs_are_served_and_those_of_a_node_stay(tmp_path, node):
    first, second = node("a"), node("b")
    for name, text in (("jit_step-1-cache", "new"), ("jit_step-2-cache", "x" * 2**21), (".hidden", "x")):
        (tmp_path / "a" / "compiled" / name).write_text(text)
    (tmp_path / "a" / "compiled" / "folder").mkdir()
    (tmp_path / "secret").write_text("x")
    os.symlink(tmp_path / "secret", tmp_path / "a" / "compiled" / "link")
    (tmp_path / "b" / "compiled" / "jit_step-1-cache").write_text("own")
    second.follow([first.address], copies=False, has_rank=True)
    until((tmp_path / "b" / "compiled" / "jit_step-2-cache").exists)
    assert (tmp_path / "b" / "compiled" / "jit_step-1-cache").read_text() == "own"
    assert not (tmp_path / "b" / "compiled" / ".hidden").exists()
    with second._connect(first.address) as transfer:
        for request in ({"step": None, "file": "../../secret"}, {"step": None, "file": "folder"},
                        {"step": 1, "file": "0" * 32}, {"step": 7}):  # fmt: skip
            assert transfer.ask_json(request, 100) is None


def test_a_node_that_lies_about_names_writes_nothing_elsewhere(tmp_path, node):
    first, second = node("a"), node("b")
    listed = json.dumps([["../stolen", 1], [str(tmp_path / "stolen"), 1], ["jit_step", 1]]).encode()
    first._find = lambda request: (io.BytesIO(sent := b"x" if "file" in request else listed), len(sent))
    second.follow([first.address], copies=False, has_rank=True)
    until((tmp_path / "b" / "compiled" / "jit_step").exists)
    assert not (tmp_path / "b" / "stolen").exists()
    assert not (tmp_path / "stolen").exists()


def test_a_node_replaces_its_own_damaged_copy(tmp_path, node, used):
    first, spare = node("a"), node("b")
    save_on(tmp_path, "a")
    copied = copy_on(tmp_path, "a", 1)
    shutil.copytree(copied.parent, tmp_path / "b" / copied.parent.name)
    flip(largest(copy_on(tmp_path, "b", 1)), 5)
    spare.follow([first.address], copies=True, has_rank=False)
    until(lambda: spare.held == 1)
    assert restored(tmp_path, run=CHECKPOINTS, node="b") == 1
    assert used == []


def test_strangers_get_nothing_and_disturb_nothing_and_cost_little_memory(tmp_path, node, monkeypatch):
    """Garbage, endless lines, a hello said again, hundreds that say a byte at a time, and a node that asks for ever."""
    monkeypatch.setattr(transfer, "_SECONDS", 2.0)
    first, spare = node("a"), node("b")
    host, port = first.address.split(":")
    save_on(tmp_path, "a")
    body = json.dumps({"nonce": secrets.token_hex(16)})
    recorded = f"{body} {prove(SECRET, 'enter', secrets.token_hex(16), body)}\n".encode()  # to another challenge
    before = psutil.Process().memory_info().rss
    with contextlib.ExitStack() as stack:
        held = []
        for number in range(300):
            stranger = stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
            held.append(stranger)
            with contextlib.suppress(OSError):
                stranger.sendall([b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100_000, recorded, b"{", b"{"][number % 5])
            for slow in held[-100:]:
                with contextlib.suppress(OSError):
                    slow.send(b"{")
        for request in (b"9" * 10**6, b"0 {}\n", b"\n" * 100):
            member = stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
            exchange_proofs(member, lambda: SECRET, {}, time.monotonic() + 5)
            with contextlib.suppress(OSError):
                member.sendall(request)
                while member.recv(2**16):
                    pass
        with socket.create_connection((host, int(port))) as foreign, pytest.raises(OSError, match="another secret"):
            exchange_proofs(foreign, lambda: "other", {}, time.monotonic() + 5)
        spare.follow([first.address], copies=True, has_rank=False)
        until(lambda: spare.held == 1)
        assert psutil.Process().memory_info().rss - before < 50e6


def test_a_new_secret_of_the_job_is_the_one_that_counts(tmp_path, node):
    first, spare = node("a"), node("b")
    save_on(tmp_path, "a")
    address, other = first.address, secrets.token_hex()
    first.start("127.0.0.1", other)
    assert first.address == address
    with pytest.raises(OSError, match="another secret"), spare._connect(address):
        pass
    spare.start("127.0.0.1", other)
    spare.follow([address], copies=True, has_rank=False)
    until(lambda: spare.held == 1)


@given(st.binary(max_size=300), st.integers(0, 10**6), st.integers(0, 7), st.booleans())
def test_bytes_that_are_changed_on_the_way_are_never_taken(tmp_path_factory, content, at, bit, changes):
    """A man in the middle passes on the answer, with one bit changed."""
    path = tmp_path_factory.mktemp("served") / "file"
    path.write_bytes(content)
    near, middle = socket.socketpair()
    with near, middle:
        server = threading.Thread(
            target=Transfer(middle, SECRET).answer, args=(lambda _: (path.open("rb"), len(content)),)
        )
        client = Transfer(near, SECRET)
        client._number = 1
        client._send("ask", "{}")
        server.start()
        server.join()
        answer = bytearray(near.recv(2**16))
    if changes:
        answer[at % len(answer)] ^= 1 << bit
    ours, theirs = socket.socketpair()
    received = bytearray()
    with ours, theirs:
        theirs.sendall(answer)
        theirs.shutdown(socket.SHUT_WR)
        client = Transfer(ours, SECRET)
        if changes:
            with pytest.raises((OSError, ValueError)):
                client.ask({}, received.extend, 300)
        else:
            assert client.ask({}, received.extend, 300)
            assert received == content


def test_more_bytes_than_the_checkpoint_has_are_refused_before_they_are_read(tmp_path):
    near, far = socket.socketpair()
    path = tmp_path / "file"
    path.write_bytes(b"x" * 101)
    with near, far:
        server = threading.Thread(target=Transfer(far, SECRET).answer, args=(lambda _: (path.open("rb"), 101),))
        server.start()
        with pytest.raises(OSError, match="101 bytes instead of at most 100"):
            Transfer(near, SECRET).ask({}, [].append, 100)
        server.join()
