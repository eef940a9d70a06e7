"""Memory that is used again: never while someone looks at it, always when nobody does."""

from __future__ import annotations

import random
from collections import deque

from chronik_repl.positions import Position
from chronik_repl.wal.arena import ROOM_BYTES, Arenas, Room
from chronik_repl.wal.disk import Buffer
from chronik_repl.wal.log import LogSettings
from tests.wal.workbench import Place, batch, lead, opened

MIB = 1 << 20


def test_memory_that_someone_looks_at_is_not_taken_again() -> None:
    arenas = Arenas()
    first = arenas.take(100_000)
    view = memoryview(first)[10:20]
    arenas.give_back(first)
    second = arenas.take(100_000)
    assert second is not first
    view.release()
    assert arenas.take(100_000) is first


def test_memory_that_nobody_needs_goes() -> None:
    arenas = Arenas()
    for arena in [arenas.take(100_000) for _ in range(20)]:
        arenas.give_back(arena)
    arenas.give_back(arenas.take(100_000))
    assert arenas.known_bytes < 6 * 110_000


def test_what_was_put_into_a_room_stays_as_long_as_it_is_held() -> None:
    chance = random.Random(3)
    room = Room()
    held: deque[tuple[memoryview, bytes]] = deque()
    for _ in range(400):
        pieces = [chance.randbytes(chance.choice([0, 1, 40, 70_000, 900_000])) for _ in range(3)]
        whole = b"".join(pieces)
        held.append((room.put(pieces, len(whole)), whole))
        if len(held) > chance.randrange(12):
            assert held[0][0] == held[0][1], "someone wrote over it"
            del held[0]
    assert all(view == whole for view, whole in held)
    held.clear()
    assert room.known_bytes < 16 * ROOM_BYTES


async def test_a_large_frame_is_the_same_for_a_slow_follower_and_for_the_disk(place: Place) -> None:
    """More than the room has buffers for, in frames of all sizes; a listener holds the newest as a ring does."""
    chance = random.Random(8)
    settings = LogSettings(segment_bytes=16 * MIB, min_free_bytes=0, scrub_mb_per_s=0)
    held: deque[tuple[Position, Buffer]] = deque()
    compared = 0
    async with opened(place, settings) as log:
        lead(log)
        log.listeners.append(lambda position, frame, records: held.append((position, frame)))
        for number in range(300):
            size = chance.choice([100, 40_000, 200_000, 700_000])
            log.append_batch("t", 0, batch(1, size, fill=number % 251), record_count=1)
            if number % 10 == 9:
                await log.durable.wait(log.end)
            while len(held) > 25:
                position, frame = held.popleft()
                assert await log.read(position, len(frame)) == frame, "another frame was put over it"
                compared += 1
        assert compared > 200
        assert log._writer._room.known_bytes < 12 * ROOM_BYTES
