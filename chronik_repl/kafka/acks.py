"""Produce requests that were appended and wait: for the disk (acks 0 and 1), or for the high watermark (acks=all).

One task a watermark serves all connections. Appends are in order, so those who wait stand in order too, and an
advance answers a run from the front: a group of a hundred requests costs one wake-up, not a hundred. Answers are made
when the batch is appended, while the disk works; a failure encodes anew.

What it promises: an answer without error is sent only once the watermark has passed the request's end. A request whose
leadership is over, or whose time is up, gets its error: never a false ack.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import trio

from chronik_repl.errors import ChronikError, DiskFailed
from chronik_repl.kafka.codes import Code, error_code
from chronik_repl.kafka.hot import Leader, Produced, encode_produced
from chronik_repl.positions import Position
from chronik_repl.standing import House
from chronik_repl.wal.watermark import Watermark

if TYPE_CHECKING:
    from chronik_repl.kafka.connection import Answer, Connection

Topics = Sequence[tuple[str, Sequence[Produced]]]
FOREVER = float("inf")


class Waiting:
    """One request. `encoded` is what it is told if all goes well."""

    __slots__ = ("answer", "begun_s", "correlation_id", "deadline", "encoded", "end", "epoch", "topics", "version")

    def __init__(
        self,
        answer: Answer,
        end: Position,
        epoch: int,
        encoded: bytes,
        version: int,
        correlation_id: int,
        topics: Topics,
        deadline: float = FOREVER,
    ) -> None:
        self.answer = answer
        self.end = end
        self.epoch = epoch
        self.encoded = encoded
        self.version = version
        self.correlation_id = correlation_id
        self.topics = topics
        self.deadline = deadline
        self.begun_s = perf_counter()

    def refused(self, code: int, leader: Leader | None = None) -> bytes:
        """The answer with every success in it turned into `code`."""
        topics = [
            (topic, [done if done.code else Produced(done.partition, code) for done in partitions])
            for topic, partitions in self.topics
        ]
        return encode_produced(self.version, self.correlation_id, topics, leader)


class Acks:
    """Those who wait for one watermark."""

    def __init__(self, house: House, watermark: Watermark, took: Callable[[float], None]) -> None:
        """`took` hears how many seconds answered requests have waited, all together."""
        self._house = house
        self._took = took
        self._watermark = watermark
        self._waiting: deque[Waiting] = deque()
        self._scope = trio.CancelScope()
        self._next_deadline = FOREVER  # no later than the first of all deadlines: some of them may be of the answered

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, waiting: Waiting) -> None:
        """Answered now if its place is passed already, later otherwise."""
        if waiting.end <= self._watermark.value:
            waiting.answer.give(waiting.encoded)
            waiting.answer.connection.flush()
            return
        queue = self._waiting
        if queue and waiting.end < queue[-1].end:  # a duplicate waits for its original, which stands further ahead
            later = []
            while queue and waiting.end < queue[-1].end:
                later.append(queue.pop())
            queue.append(waiting)
            queue.extend(reversed(later))
        else:
            queue.append(waiting)
        if waiting.deadline < self._next_deadline:
            self._next_deadline = self._scope.deadline = waiting.deadline

    async def run(self) -> None:
        """Until cancelled. Raises DiskFailed, having told everyone who waits."""
        watermark = self._watermark
        while True:
            value = watermark.value
            self._refuse_old()  # first: the next leader's frames may stand where ours stood, and move the watermark
            self._answer(value)
            if not self._waiting:
                self._next_deadline = FOREVER
            try:
                with trio.CancelScope(deadline=self._next_deadline) as self._scope:
                    await watermark.wait_beyond(value)
            except DiskFailed:
                self._refuse(Code.KAFKA_STORAGE_ERROR, list(self._waiting))
                raise
            except ChronikError as error:
                self._refuse(error_code(error), list(self._waiting))
            if self._scope.cancelled_caught:
                now = trio.current_time()
                self._refuse(Code.REQUEST_TIMED_OUT, [w for w in self._waiting if w.deadline <= now])
                self._next_deadline = min((w.deadline for w in self._waiting), default=FOREVER)

    def _answer(self, value: Position) -> None:
        queue = self._waiting
        touched: dict[Connection, None] = {}
        begun_s, count = 0.0, 0
        while queue and queue[0].end <= value:
            waiting = queue.popleft()
            answer = waiting.answer
            answer.give(waiting.encoded)
            touched[answer.connection] = None
            begun_s += waiting.begun_s
            count += 1
        if count:
            self._took(count * perf_counter() - begun_s)
        for connection in touched:
            connection.flush()

    def _refuse_old(self) -> None:
        """A leadership that ended while this task was on its way to wait leaves its requests behind."""
        epoch = self._house.epoch
        if self._waiting and self._waiting[0].epoch != epoch:
            self._refuse(Code.NOT_LEADER_OR_FOLLOWER, [w for w in self._waiting if w.epoch != epoch])

    def _refuse(self, code: Code, refused: list[Waiting]) -> None:
        if not refused:
            return
        self._house.meters.add("kafka_errors", len(refused), "Produce", code.name)
        gone = set(map(id, refused))
        self._waiting = deque(waiting for waiting in self._waiting if id(waiting) not in gone)
        touched: dict[Connection, None] = {}
        for waiting in refused:
            waiting.answer.give(waiting.refused(code))
            touched[waiting.answer.connection] = None
        for connection in touched:
            connection.flush()
