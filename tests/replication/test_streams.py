"""What a connection's bytes go through: buffers that are used again, and a socket that is not waited for in vain."""

from __future__ import annotations

import random
import socket

import pytest
import trio
import trio.testing

from chronik_repl.replication.messages import Feeder, Frames
from chronik_repl.replication.streams import TcpStream
from chronik_repl.wal import frame


def _frame(size: int, byte: int) -> bytes:
    raw, _ = frame.encode(frame.topic_prefix("t"), 0, 1, 0, 0, 1, 0, 0, 0, (bytes([byte]) * size,))
    return raw


def test_frames_stay_what_they_are_while_they_are_held_and_their_memory_comes_back_afterwards() -> None:
    chance = random.Random(5)
    feeder = Feeder()
    held: list[tuple[Frames, bytes]] = []
    for number in range(600):
        data = _frame(chance.choice([100, 20_000, 300_000]), number % 256)
        for at in range(0, len(data), 65_536):
            piece = data[at : at + 65_536]
            while piece:
                room = feeder.room()
                part = piece[: len(room)]
                room[: len(part)] = part
                feeder.fed(len(part))
                piece = piece[len(part) :]
        event = feeder.next_event()
        assert isinstance(event, Frames)
        assert feeder.next_event() is None
        held.append((event, data))
        if len(held) > 10:
            event, data = held.pop(0)
            assert event.view == data, "someone wrote over it"
    assert feeder._arenas.known_bytes < 40 * 1024 * 1024


async def pair() -> tuple[TcpStream, TcpStream]:
    near, far = socket.socketpair()
    for end in (near, far):
        end.setblocking(False)
    return TcpStream(near), TcpStream(far)


async def test_what_does_not_leave_at_once_leaves_in_order() -> None:
    near, far = await pair()
    data = random.Random(1).randbytes(3_000_000)
    pieces = [data[at : at + 1000] for at in range(0, len(data), 1000)]
    assert near.send_now(*pieces[:3])
    assert not near.send_now(*pieces[3:1500]), "more than the socket holds, and than one call takes"
    assert not near.send_now(*pieces[1500:2000])
    got = bytearray()

    async def take() -> None:
        buffer = memoryview(bytearray(70_000))
        while len(got) < len(data):
            size = await far.receive_into(buffer, len(data) - len(got))
            got.extend(buffer[:size])

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(take)
            await near.send_all(*pieces[2000:])
    assert got == data
    near.close()
    assert await far.receive_into(memoryview(bytearray(10))) == 0
    with pytest.raises(trio.ClosedResourceError):
        near.send_now(b"x")
    far.close()


async def test_closing_wakes_who_receives() -> None:
    near, far = await pair()
    with trio.fail_after(5), pytest.RaisesGroup(trio.ClosedResourceError):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(near.receive_into, memoryview(bytearray(10)))
            await trio.testing.wait_all_tasks_blocked()
            near.close()
    far.close()
