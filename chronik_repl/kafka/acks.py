"""Produce requests that were appended and wait: for the disk (acks 0 and 1), or for the high watermark (acks=all).

Appends are in order, so those who wait stand in order too, and an advance answers a run from the front: in the step in
which the watermark moves, without a task between, and with one send for all answers of a connection. Answers are made
when the batch is appended, while the disk works; a failure encodes anew.

What it promises: an answer without error is sent only once the watermark has passed the request's end. A request whose
leadership is over, or whose time is up, gets its error: never a false ack.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter

import trio

from chronik_repl.errors import ChronikError, DiskFailed
from chronik_repl.kafka.codes import Code, error_code
from chronik_repl.kafka.connection import Answer, Connection
from chronik_repl.kafka.hot import Leader, Produced, encode_produced
from chronik_repl.positions import Position
from chronik_repl.standing import House
from chronik_repl.wal.watermark import Watermark

Topics = Sequence[tuple[str, Sequence[Produced]]]
FOREVER = float("inf")
NEVER = Position(2**63)


class Waiting(Answer):
    """One request. `encoded` is what it is told if all goes well."""

    __slots__ = ("begun_s", "correlation_id", "deadline", "encoded", "end", "epoch", "topics", "version")

    def __init__(
        self,
        connection: Connection,
        held: int,
        end: Position,
        epoch: int,
        encoded: bytes,
        version: int,
        correlation_id: int,
        topics: Topics,
        deadline: float = FOREVER,
    ) -> None:
        self.connection = connection
        self.held = held
        self.sending = 0
        self.pieces = None
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
            waiting.give(waiting.encoded)
            waiting.connection.flush()
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
        """Watch the watermark and the clock, until cancelled. Raises DiskFailed, having told everyone who waits."""
        watermark = self._watermark
        watermark.watchers.append(self)
        try:
            while True:
                try:
                    with trio.CancelScope(deadline=self._next_deadline) as self._scope:
                        await watermark.wait(NEVER)
                except DiskFailed:
                    raise
                except ChronikError:
                    continue  # everyone was told
                now = trio.current_time()
                self._refuse(Code.REQUEST_TIMED_OUT, [w for w in self._waiting if w.deadline <= now])
                self._next_deadline = min((w.deadline for w in self._waiting), default=FOREVER)
        finally:
            watermark.watchers.remove(self)

    def passed(self, value: Position) -> None:
        """The watermark's: it is there now."""
        queue = self._waiting
        if not queue or queue[0].end > value:
            return
        epoch = self._house.epoch
        if queue[0].epoch != epoch:  # what passed may be the next leader's frames, where ours stood
            self._refuse(Code.NOT_LEADER_OR_FOLLOWER, [w for w in queue if w.epoch != epoch])
            queue = self._waiting
        touched: dict[Connection, None] = {}
        begun_s, count = 0.0, 0
        while queue and queue[0].end <= value:
            waiting = queue.popleft()
            waiting.give(waiting.encoded)
            touched[waiting.connection] = None
            begun_s += waiting.begun_s
            count += 1
        self._took(count * perf_counter() - begun_s)
        for connection in touched:
            connection.flush()

    def failed(self, error: BaseException) -> None:
        """The watermark's: nothing that waits now will come to be."""
        code = Code.KAFKA_STORAGE_ERROR
        if isinstance(error, ChronikError) and not isinstance(error, DiskFailed):
            code = error_code(error)
        self._refuse(code, list(self._waiting))

    def _refuse(self, code: Code, refused: list[Waiting]) -> None:
        if not refused:
            return
        self._house.meters.add("kafka_errors", len(refused), "Produce", code.name)
        gone = set(map(id, refused))
        self._waiting = deque(waiting for waiting in self._waiting if id(waiting) not in gone)
        touched: dict[Connection, None] = {}
        for waiting in refused:
            waiting.give(waiting.refused(code))
            touched[waiting.connection] = None
        for connection in touched:
            connection.flush()
