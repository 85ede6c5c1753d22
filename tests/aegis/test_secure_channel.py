"""Channels between supervisors: what is changed, repeated or endless ends its own connection only."""

import secrets
import select
import socket
from contextlib import ExitStack

from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.aegis.secure_channel import SecureChannel
from zaya_jax.run.peer import Peer


def pair(stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = stack.enter_context(socket.create_connection(server.getsockname(), timeout=10))
        return stack.enter_context(server.accept()[0]), far


def connect(stack: ExitStack) -> tuple[SecureChannel, SecureChannel, socket.socket]:
    """The channels of leader and member, and the socket to which the member writes."""
    near, far = pair(stack)
    key = secrets.token_hex()
    return SecureChannel(Peer(near), key, is_leader=True), SecureChannel(Peer(far), key, is_leader=False), far


def receive(channel: SecureChannel, count: int = 1) -> list[dict]:
    """The next messages, or those before the channel closed."""
    messages = []
    while channel.is_open and len(messages) < count and select.select([channel], [], [], 0.5)[0]:
        messages += channel.receive()
    return messages


def test_messages_arrive_in_order_in_both_directions():
    with ExitStack() as stack:
        leader, member, _ = connect(stack)
        for number in range(3):
            leader.send({"number": number})
            member.send({"text": "ä\n" * number})
        assert receive(member, 3) == [{"number": number} for number in range(3)]
        assert receive(leader, 3) == [{"text": "ä\n" * number} for number in range(3)]
        assert leader.is_open
        assert member.is_open
        member.close()
        assert receive(leader) == []
        assert not leader.is_open


@given(st.data())
def test_what_is_repeated_reordered_left_out_or_changed_closes_the_channel(data):
    """A man in the middle has recorded the member's lines, and sends others: all up to the first wrong one count."""
    with ExitStack() as stack:
        leader, member, raw = connect(stack)
        sent = [{"number": number} for number in range(4)]
        lines = []
        member._peer.send = lines.append  # the wire
        for message in sent:
            member.send(message)
        forged = data.draw(st.lists(st.one_of(st.sampled_from(lines), st.sampled_from(lines).flatmap(_changed)),
                                    min_size=1, max_size=6))  # fmt: skip
        raw.sendall("".join(f"{line}\n" for line in forged).encode())
        right = 0
        while right < min(len(forged), 4) and forged[right] == lines[right]:
            right += 1
        assert receive(leader, len(forged)) == sent[:right]
        assert leader.is_open == (right == len(forged))


def _changed(line: str) -> st.SearchStrategy[str]:
    letters = st.characters(codec="ascii", exclude_characters="\n")
    places = st.tuples(st.integers(0, len(line) - 1), letters)
    return places.map(lambda place: line[: place[0]] + place[1] + line[place[0] + 1 :])


def test_lines_of_another_connection_or_direction_do_not_fit():
    with ExitStack() as stack:
        first, member, _ = connect(stack)
        second, _, raw = connect(stack)
        lines = []
        member._peer.send = first._peer.send = lines.append
        member.send({"number": 1})
        raw.sendall(f"{lines[0]}\n".encode())
        assert receive(second) == []
        assert not second.is_open
        third, mirrored, raw = connect(stack)
        third._peer.send = lines.append
        third.send({"number": 1})
        raw.sendall(f"{lines[-1]}\n".encode())  # the leader's own line, sent back to it
        assert receive(third) == []
        assert not third.is_open
        assert mirrored.is_open


def test_a_line_without_end_is_dropped_before_it_fills_memory():
    with ExitStack() as stack:
        leader, _, raw = connect(stack)
        raw.sendall(b"9" * 2**18)
        assert receive(leader) == []
        assert not leader.is_open


def test_a_member_that_reads_nothing_is_dropped_before_it_fills_memory():
    with ExitStack() as stack:
        leader, _, _ = connect(stack)
        sent = 0
        while leader.is_open and sent < 6000:
            leader.send({"text": "x" * 1000})
            sent += 1
        assert not leader.is_open  # after what the kernel holds, and a little
        assert len(leader._peer.unsent) < 2**17
