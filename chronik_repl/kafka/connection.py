"""One client's connection: requests in, in order; answers out, in the same order.

Whole requests are taken out of the buffer, by the reading task or (poller.py) on its behalf, and handed to dispatch.
What comes back is an `Answer`: ready, or (Produce) to be ready when a watermark has passed. Answers stand in a queue;
whoever makes the first one ready also sends it, and all ready ones behind it, in one call that does not wait. Only what
the socket does not take at once is left to the writing task. So a produce that waits for followers holds up no later
produce, and no task is woken for a request or an answer that needs no waiting.

What is bounded: a request's size, checked when its first bytes are here, before any room is made for it; the time from
its first byte to its last (a byte a second does not help); the bytes of large requests of all connections together;
requests and bytes of one connection that wait for their answer, and bytes of answers that wait to be sent, of one
connection and of all together; the time a client may take to read an answer. A client
beyond these is read no further until it has taken its answers, or is dropped. And while others wait for room in what
all share, a client that holds some must also use it: one that sends or reads hardly anything is dropped (`hoards`).
"""

from __future__ import annotations

import struct
from collections import deque
from enum import Enum, auto
from typing import Protocol

import trio

from chronik_repl.errors import ProtocolError
from chronik_repl.kafka.budget import Budget
from chronik_repl.kafka.context import KIB, MIB, Client, Limits
from chronik_repl.kafka.poller import Poller
from chronik_repl.kafka.wire import Buffer, Wire, first_of, rest_of
from chronik_repl.meters import Meters

SMALL = 16 * KIB  # an idle connection's buffer
LARGE = MIB + 64 * KIB  # holds what librdkafka sends at most by default
LARGE_KEPT = 16
COUNTED = 64 * KIB  # a request of more than this is counted in the shared budget before it is read
HEAD = struct.Struct(">ih")  # a request's length and API key
PRODUCE = 0
REQUEST_BYTES_MIN = 10
SENT_BYTES_A_SECOND_MIN = 64 * KIB  # what a client must read, beside the time that every answer has
BURST_BYTES = 512 * KIB  # read at a stretch before others have their turn
SEND_STEP = 256 * KIB  # of an answer that the socket did not take at once


class TooSlow(ProtocolError):
    """The client did not send or read within its time."""


class Need(Enum):
    """What a connection's next step needs."""

    BYTES = auto()
    ROOM = auto()  # for one more answer
    BUDGET = auto()  # for the request's bytes
    TASK = auto()  # a request that may wait


class Handler(Protocol):
    """Where requests go. `held` bytes of the receiving budget are the request's own; its view is good until the end."""

    def take(self, connection: Connection, view: memoryview, held: int) -> None:
        """A Produce request, which never waits. Raises ProtocolError."""

    async def answer(self, connection: Connection, view: memoryview, held: int) -> None:
        """Any other. Raises ProtocolError."""


class Answer:
    """A place in a connection's queue, and what stands in it once it is known."""

    __slots__ = ("connection", "held", "pieces", "sending")

    def __init__(self, connection: Connection, held: int) -> None:
        self.connection = connection
        self.held = held  # of the receiving budget, until the answer is known
        self.sending = 0  # of the sending budget, until the answer is sent
        self.pieces: list[Buffer] | None = None

    def give(self, encoded: Buffer) -> None:
        """`flush` of the connection is the caller's: it may have more answers for it."""
        self.pieces = [encoded] if encoded else []
        if self.held:
            self.connection.known(self)


class Buffers:
    """Large receive buffers that nobody uses now."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def take(self, size: int) -> bytearray:
        if size <= COUNTED or size > LARGE:  # one that nobody counts is no larger than it must be
            return bytearray(max(size, COUNTED))
        return self._free.pop() if self._free else bytearray(LARGE)

    def give_back(self, buffer: bytearray) -> None:
        if len(buffer) == LARGE and len(self._free) < LARGE_KEPT:
            self._free.append(buffer)


class Shared:
    """What the connections of one server have in common."""

    def __init__(self, limits: Limits, meters: Meters) -> None:
        inflight = meters.values["kafka_inflight_bytes"]
        self.limits = limits
        self.receiving = Budget(limits.receiving_bytes_max, inflight)
        self.sending = Budget(limits.sending_bytes_max, inflight)
        self.buffers = Buffers()
        self.poller = Poller()
        self.connections: set[Connection] = set()
        self.received_bytes = meters.values["kafka_received_bytes"]
        self.sent_bytes = meters.values["kafka_sent_bytes"]
        self.received_bytes.setdefault((), 0)
        self.sent_bytes.setdefault((), 0)


class Connection:
    def __init__(self, wire: Wire, client: Client, shared: Shared, *, polled: bool) -> None:
        """`polled`: the wire has a socket that the poller watches, and its `receive_now` works."""
        self.client = client
        self.scope = trio.CancelScope()
        self._wire = wire
        self._limits = shared.limits
        self._receiving, self._sending = shared.receiving, shared.sending
        self._received_bytes, self._sent_bytes = shared.received_bytes, shared.sent_bytes
        self._buffers = shared.buffers
        self._answers: deque[Answer] = deque()
        self._waiting_bytes = 0  # of the receiving budget, in requests that wait for their answer
        self._ready_bytes = 0  # of the sending budget, in answers that stand behind one that is not known
        self._unsent: list[Buffer] = []
        self._unsent_held = 0
        self._unsent_since = 0.0
        self._unsent_taken = 0  # by the client, since then
        self._writer: trio.Event = trio.Event()
        self._room: trio.Event | None = None
        self._closed = False
        self._poller = shared.poller if polled else None
        self._use(bytearray(SMALL))
        self._start = self._end = 0  # of what is in the buffer and not handled
        self._wanted = HEAD.size
        self._counted = 0  # bytes taken from the budget for the request that is being read
        self._ended = False
        self._parked: trio.Event | None = None  # the task, while it waits for bytes
        self._error: Exception | None = None  # what its wake-up raises
        self._handler: Handler
        self.now = trio.current_time()  # of the last pass of the event loop that had to do with this client
        self._opened = self._began = self.now  # `began`: the request that is being read, or the silence
        self.due = self._began + shared.limits.idle_timeout_s

    # ------------------------------------------------------------------------------------------------ answers

    def answer(self, size: int) -> Answer:
        """A place for the answer to a request of `size` bytes, in its order."""
        answer = Answer(self, size)
        self.expect(answer)
        return answer

    def ready(self, pieces: list[Buffer], held: int = 0) -> None:
        """The next answer, known at once; sent behind those that are not. `held` bytes of the sending budget were taken
        for it; what it has more or less is settled here."""
        answer = Answer(self, 0)
        answer.pieces = pieces
        answer.sending = size = sum(map(len, pieces))
        if size > held:
            self._sending.take_anyway(size - held)
        else:
            self._sending.give_back(held - size)
        self._ready_bytes += size
        self._answers.append(answer)
        self.flush()

    def expect(self, answer: Answer) -> None:
        """It has its place, in the order of requests."""
        self._waiting_bytes += answer.held
        self._answers.append(answer)

    def known(self, answer: Answer) -> None:
        self._receiving.give_back(answer.held)
        self._waiting_bytes -= answer.held
        answer.held = 0

    def flush(self) -> None:
        """Send what is ready, as far as the socket takes it."""
        if self._unsent or self._closed:
            return
        answers = self._answers
        ready: list[Buffer] = []
        held = 0
        while answers and answers[0].pieces is not None:
            answer = answers.popleft()
            ready += answer.pieces  # type: ignore[arg-type]
            held += answer.sending
        self._ready_bytes -= held
        if ready:
            try:
                sent = self._wire.send_now(ready)
            except OSError:
                self._sending.give_back(held)
                self.scope.cancel()
                return
            self._sent_bytes[()] += sent
            unsent = rest_of(ready, sent)
            if unsent:
                self._unsent, self._unsent_held = unsent, held
                self._unsent_since, self._unsent_taken = trio.current_time(), 0
                self._writer.set()
                return
            self._sending.give_back(held)
        if self._room is not None and self._has_room():
            self._room.set()

    async def write(self) -> None:
        """What did not fit into the socket at once. Raises OSError, TooSlow."""
        while True:
            await self._writer.wait()
            self._writer = trio.Event()
            while self._unsent:
                size = sum(map(len, self._unsent))
                with trio.move_on_after(self._limits.send_timeout_s + size / SENT_BYTES_A_SECOND_MIN) as scope:
                    while self._unsent:
                        step = first_of(self._unsent, SEND_STEP)
                        await self._wire.send(step)
                        sent = sum(map(len, step))
                        self._unsent = rest_of(self._unsent, sent)
                        self._unsent_taken += sent
                        self._sent_bytes[()] += sent
                if scope.cancelled_caught:
                    raise TooSlow(f"the client did not read {size} bytes in time")
                self._sending.give_back(self._unsent_held)
                self._unsent_held = 0
                self.flush()

    def hoards(self, budget: Budget, now: float) -> bool:
        """Does this client hold room in a budget and do next to nothing with it?"""
        unread = bool(self._unsent) and self._crawls(now - self._unsent_since, self._unsent_taken)
        if budget is self._sending:
            return unread
        came = self._end - self._start
        return self._counted > 0 and (unread or (came < self._wanted and self._crawls(now - self._began, came)))

    def _crawls(self, took_s: float, size: int) -> bool:
        return size < (took_s - self._limits.crowded_patience_s) * self._limits.crowded_bytes_a_second_min

    def _has_room(self) -> bool:
        limits = self._limits
        return (
            not self._unsent
            and len(self._answers) < limits.pipelined_requests_max
            and self._waiting_bytes < limits.pipelined_bytes_max
            and self._ready_bytes < limits.unsent_bytes_max
        )

    async def wait_for_room(self) -> None:
        """Until this client has taken, or been given, enough of its answers to be read further."""
        while not self._has_room():
            self._room = trio.Event()
            await self._room.wait()
        self._room = None

    # ----------------------------------------------------------------------------------------------- requests

    async def read(self, handler: Handler) -> None:
        """Handle every request, until the client is done. Raises OSError, ProtocolError."""
        self._handler = handler
        try:
            while True:
                match self._advance():
                    case Need.BYTES:
                        await self._fill()
                        if self._ended:
                            if self._end > self._start:
                                raise ProtocolError("the client left in the middle of a request")
                            return
                    case Need.ROOM:
                        await self.wait_for_room()
                        self.now = trio.current_time()
                    case Need.BUDGET:
                        await self._receiving.take(self._wanted)
                        self.now = trio.current_time()
                        self._counted = self._wanted
                    case Need.TASK:
                        held, self._counted = self._counted, 0
                        view = self._view[self._start + 4 : self._start + self._wanted]
                        await handler.answer(self, view, held)
                        self.now = trio.current_time()
                        self._start += self._wanted
                        self._handled()
        finally:
            self._receiving.give_back(self._counted)
            self._counted = 0
            self._buffers.give_back(self._buffer)

    def _advance(self) -> Need:
        """Handle what can be handled without waiting, and say what the next step needs."""
        while self._end - self._start >= HEAD.size:
            size, key = HEAD.unpack_from(self._buffer, self._start)
            if not self._allowed(size, key):
                raise ProtocolError(f"a request of {size} bytes for API {key}")
            self._wanted = wanted = size + 4
            if self._end - self._start < wanted:
                if wanted > len(self._buffer) - self._start and not self._make_room(wanted):
                    return Need.BUDGET
                return Need.BYTES
            if not self._has_room():
                return Need.ROOM
            if key != PRODUCE or not self.client.authenticated:
                return Need.TASK
            if not self._counted:
                if not self._receiving.take_now(wanted):
                    return Need.BUDGET
                self._counted = wanted
            held, self._counted = self._counted, 0
            self._handler.take(self, self._view[self._start + 4 : self._start + wanted], held)
            self._start += wanted
            self._handled()
        self._wanted = HEAD.size
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._buffer) > SMALL:
                self._buffers.give_back(self._buffer)
                self._use(bytearray(SMALL))
        elif HEAD.size > len(self._buffer) - self._start:
            self._make_room(HEAD.size)
        return Need.BYTES

    def _handled(self) -> None:
        self._began = self.now

    def _make_room(self, wanted: int) -> bool:
        """For a request of which a part is here; False if its bytes are not counted yet and must be."""
        if wanted > COUNTED and not self._counted:
            if not self._receiving.take_now(wanted):
                return False
            self._counted = wanted
        part = bytes(self._view[self._start : self._end])
        if wanted > len(self._buffer):
            larger = self._buffers.take(wanted)
            self._buffers.give_back(self._buffer)
            self._use(larger)
        self._view[: len(part)] = part
        self._start, self._end = 0, len(part)
        return True

    def _use(self, buffer: bytearray) -> None:
        self._buffer = buffer
        self._view = memoryview(buffer)

    async def _fill(self) -> None:
        """More bytes, or the end of them. Raises OSError, TooSlow; ProtocolError for what came meanwhile."""
        self._set_due()
        if self._poller is None:
            with trio.move_on_at(self.due) as scope:
                count = await self._wire.receive(self._view[self._end :])
            self.now = trio.current_time()
            if scope.cancelled_caught:
                self._too_slow()
            else:
                self._received(count)
            return
        self._error = None
        self._parked = woken = trio.Event()
        if self.take_bytes(trio.current_time(), to_the_end=True):  # it may have come while nobody looked
            self._wake()
        try:
            await woken.wait()
        finally:
            self._parked = None
        if self._error is not None:
            raise self._error

    def _set_due(self) -> None:
        """When the client will have been silent, or slow with the request that it has begun, for too long."""
        limits = self._limits
        due = self._began + (limits.request_timeout_s if self._end else limits.idle_timeout_s)
        if not self.client.authenticated:
            due = min(due, self._opened + limits.unauthenticated_timeout_s)
        self.due = due
        if self._poller is not None:
            self._poller.hurry(due)

    def take_bytes(self, now: float, *, to_the_end: bool) -> bool:
        """The poller's: whatever is there, while the task waits for nothing else. True: there may be more.

        `to_the_end`: until nothing is there; otherwise a short read is taken for that."""
        if self._parked is None:
            return False  # the task is at work, and looks for itself when it is done
        self.now = now
        try:
            received = 0
            while received < BURST_BYTES:
                into = self._view[self._end :]
                count = self._wire.receive_now(into)
                if count is None:
                    break
                whole = count == len(into)
                self._received(count)
                if self._ended or self._advance() is not Need.BYTES:
                    self._wake()
                    return False
                if not whole and not to_the_end:
                    break
                received += count
            else:
                return True
            if self._end:  # else it stays as it is, too early at worst: `overdue` looks again
                self._set_due()
        except (OSError, ProtocolError) as error:
            self._error = error
            self._wake()
        return False

    def _received(self, count: int) -> None:
        if count == 0:
            self._ended = True
        elif self._end == 0:
            self._began = self.now
        self._end += count
        self._received_bytes[()] += count

    def _wake(self) -> None:
        if self._parked is not None:
            self._parked.set()
            self._parked = None

    def overdue(self, now: float) -> None:
        """The poller's: the time is up, if the client is still what we wait for."""
        if self._parked is None:
            self.due = float("inf")  # it is our turn; the next wait for bytes sets it anew
            return
        self._set_due()
        if self.due > now:
            return
        try:
            self._too_slow()
        except TooSlow as error:
            self._error = error
        self._wake()

    def _too_slow(self) -> None:
        if self._end == 0:
            self._ended = True
        else:
            raise TooSlow(f"a request of {self._wanted} bytes did not arrive in time")

    def _allowed(self, size: int, key: int) -> bool:
        limits = self._limits
        if not self.client.authenticated:
            most = limits.unauthenticated_bytes_max
        else:
            most = limits.request_bytes_max if key == PRODUCE else limits.small_request_bytes_max
        return REQUEST_BYTES_MIN <= size <= most

    def closed(self) -> None:
        """Give back everything that is held. Answers that come later are dropped."""
        self._closed = True
        self._sending.give_back(self._unsent_held)
        self._unsent, self._unsent_held = [], 0
        for answer in self._answers:
            if answer.held:
                self.known(answer)
            self._sending.give_back(answer.sending)
            answer.sending = 0
        self._answers.clear()
