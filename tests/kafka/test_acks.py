"""Those who wait for a watermark: each is answered once it has passed, in order, and never falsely. And the budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import trio

from chronik_repl.errors import NotLeader
from chronik_repl.kafka.acks import Acks, Waiting
from chronik_repl.kafka.budget import Budget
from chronik_repl.kafka.codes import Code
from chronik_repl.kafka.connection import Connection, Shared
from chronik_repl.kafka.context import Client, Limits
from chronik_repl.kafka.hot import Produced, encode_produced
from chronik_repl.meters import Meters
from chronik_repl.positions import Position
from chronik_repl.wal.watermark import Watermark


class Paper:
    """A wire that keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def receive_now(self, into: memoryview) -> int | None:
        return None

    async def receive(self, into: memoryview) -> int:
        await trio.sleep_forever()
        raise AssertionError

    def send_now(self, pieces: Sequence[bytes | bytearray | memoryview]) -> int:
        self.sent += map(bytes, pieces)
        return sum(map(len, pieces))

    async def send(self, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        raise AssertionError

    async def close(self) -> None:
        await trio.lowlevel.checkpoint()


class Desk:
    """A connection on paper, a watermark, and those who wait for it."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.epoch = 1
        self.meters = Meters()
        self.paper = Paper()
        self.shared = Shared(Limits(), self.meters)
        self.connection = Connection(self.paper, Client("here"), self.shared, polled=False)
        self.watermark = Watermark(Position(0))
        self.acks = Acks(self, self.watermark, lambda seconds: None)  # type: ignore[arg-type]
        nursery.start_soon(self.acks.run)

    def wait(self, end: int, *, deadline: float = float("inf")) -> None:
        topics = [("t", [Produced(0, 0, end)])]
        encoded = encode_produced(9, end, topics)
        assert self.shared.receiving.take_now(10)
        waiting = Waiting(self.connection, 10, Position(end), self.epoch, encoded, 9, end, topics, deadline)
        self.connection.expect(waiting)
        self.acks.add(waiting)

    def answers(self) -> list[tuple[int, int]]:
        """(correlation id, error code) of what was sent."""
        return [(int.from_bytes(sent[4:8], "big"), int.from_bytes(sent[17:19], "big")) for sent in self.paper.sent]


@pytest.fixture
async def desk(nursery: trio.Nursery) -> Any:
    desk = Desk(nursery)
    await trio.testing.wait_all_tasks_blocked()
    return desk


async def settled() -> None:
    await trio.testing.wait_all_tasks_blocked()


async def test_each_is_answered_once_the_watermark_has_passed_its_end(desk: Desk) -> None:
    for end in (10, 20, 30):
        desk.wait(end)
    desk.watermark.advance(Position(19))
    await settled()
    assert desk.answers() == [(10, 0)]
    desk.watermark.advance(Position(30))
    await settled()
    assert desk.answers() == [(10, 0), (20, 0), (30, 0)]
    assert desk.shared.receiving.held == 0


async def test_a_duplicate_waits_for_its_original_and_not_for_those_before_it(desk: Desk) -> None:
    desk.wait(30)
    desk.wait(10)  # a duplicate of what stands at 10, of the same connection: answered in the order of asking
    desk.watermark.advance(Position(10))
    await settled()
    assert desk.answers() == []
    desk.watermark.advance(Position(30))
    await settled()
    assert desk.answers() == [(30, 0), (10, 0)]


async def test_kf33_what_was_passed_before_anyone_waited_is_answered_at_once(desk: Desk) -> None:
    desk.watermark.advance(Position(50))
    desk.wait(10)
    assert desk.answers() == [(10, 0)]


async def test_the_end_of_a_leadership_fails_those_who_wait(desk: Desk) -> None:
    desk.wait(10)
    desk.watermark.fail(NotLeader("deposed"))
    await settled()
    assert desk.answers() == [(10, Code.NOT_LEADER_OR_FOLLOWER)]


async def test_the_next_leaders_frames_ack_nothing_of_ours(desk: Desk) -> None:
    """The failure may come while nobody waits for it: the epoch tells too."""
    desk.wait(10)
    desk.watermark.advance(Position(1))  # the task is on its way
    desk.watermark.fail(NotLeader("deposed"))  # and does not hear of this
    desk.epoch = 2
    desk.watermark.advance(Position(100))  # the next leader's
    await settled()
    assert desk.answers() == [(10, Code.NOT_LEADER_OR_FOLLOWER)]


async def test_times_are_kept_one_by_one(desk: Desk, autojump_clock: trio.testing.MockClock) -> None:
    now = trio.current_time()
    desk.wait(10, deadline=now + 5)
    desk.wait(20, deadline=now + 1)
    desk.wait(30, deadline=now + 9)
    await trio.sleep(2)
    assert desk.answers() == []  # answers keep their order: the second stands behind the first
    desk.watermark.advance(Position(10))
    await settled()
    assert desk.answers() == [(10, 0), (20, Code.REQUEST_TIMED_OUT)]
    await trio.sleep(10)
    assert desk.answers()[2:] == [(30, Code.REQUEST_TIMED_OUT)]
    desk.watermark.advance(Position(100))
    await settled()
    assert len(desk.answers()) == 3


async def test_a_budget_is_first_come_first_served(nursery: trio.Nursery) -> None:
    gauge: dict[tuple[str, ...], float] = {}
    budget = Budget(100, gauge)
    order = []

    async def take(size: int) -> None:
        await budget.take(size)
        order.append(size)

    assert budget.take_now(80)
    for size in (50, 10):
        nursery.start_soon(take, size)
        await settled()
    assert not budget.take_now(5), "overtook those who wait"
    budget.give_back(20)
    await settled()
    assert (order, budget.held) == ([], 60), "the small one overtook the large one"
    budget.give_back(60)
    await settled()
    assert (sorted(order), budget.held, gauge[()]) == ([10, 50], 60, 60)


async def test_a_claim_larger_than_the_budget_gets_it_alone(nursery: trio.Nursery) -> None:
    budget = Budget(100)
    assert budget.take_now(1)
    with trio.move_on_after(0.01) as scope:
        await budget.take(1_000)
    assert scope.cancelled_caught
    budget.give_back(1)
    assert budget.take_now(1_000)
    assert not budget.take_now(1)
    budget.give_back(1_000)
    assert budget.held == 0
