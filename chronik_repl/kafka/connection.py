"""One client's connection: requests in, in order; answers out, in the same order.

The reading task takes whole requests out of its buffer and hands each to dispatch. What comes back is an `Answer`:
ready, or (Produce) to be ready when a watermark has passed. Answers stand in a queue; whoever makes the first one ready
also sends it, and all ready ones behind it, in one call that does not wait. Only what the socket does not take at once
is left to the writing task. So a produce that waits for followers holds up no later produce, and no task is woken for
an answer that fits.

What is bounded: a request's size, checked when its first bytes are here, before any room is made for it; the time from
its first byte to its last (a byte a second does not help); the bytes of large requests of all connections together;
requests and bytes of one connection that wait for their answer; the time a client may take to read an answer. A client
beyond these is read no further until it has taken its answers, or is dropped.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Awaitable, Callable

import trio

from chronik_repl.errors import ProtocolError
from chronik_repl.kafka.budget import Budget
from chronik_repl.kafka.context import KIB, MIB, Client, Limits
from chronik_repl.kafka.wire import Buffer, Wire, rest_of

SMALL = 16 * KIB  # an idle connection's buffer
LARGE = MIB + 64 * KIB  # holds what librdkafka sends at most by default
LARGE_KEPT = 16
COUNTED = 64 * KIB  # a request of more than this is counted in the shared budget before it is read
HEAD = struct.Struct(">ih")  # a request's length and API key
PRODUCE = 0
REQUEST_BYTES_MIN = 10
SENT_BYTES_A_SECOND_MIN = 64 * KIB  # what a client must read, beside the time that every answer has
BURST_BYTES = 512 * KIB  # read at a stretch before others have their turn


class TooSlow(ProtocolError):
    """The client did not send or read within its time."""


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
        if size > LARGE:
            return bytearray(size)
        return self._free.pop() if self._free else bytearray(LARGE)

    def give_back(self, buffer: bytearray) -> None:
        if len(buffer) == LARGE and len(self._free) < LARGE_KEPT:
            self._free.append(buffer)


class Connection:
    def __init__(
        self, wire: Wire, client: Client, limits: Limits, receiving: Budget, sending: Budget, buffers: Buffers
    ) -> None:
        self.client = client
        self.scope = trio.CancelScope()
        self.received_bytes = self.sent_bytes = 0
        self._wire = wire
        self._limits = limits
        self._receiving, self._sending = receiving, sending
        self._buffers = buffers
        self._answers: deque[Answer] = deque()
        self._waiting_bytes = 0  # of the receiving budget, in requests that wait for their answer
        self._unsent: list[Buffer] = []
        self._unsent_held = 0
        self._writer: trio.Event = trio.Event()
        self._room: trio.Event | None = None
        self._closed = False
        self._opened = trio.current_time()

    # ------------------------------------------------------------------------------------------------ answers

    def answer(self, size: int) -> Answer:
        """A place for the answer to a request of `size` bytes, in its order."""
        answer = Answer(self, size)
        self._waiting_bytes += size
        self._answers.append(answer)
        return answer

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
        if ready:
            try:
                sent = self._wire.send_now(ready)
            except OSError:
                self._sending.give_back(held)
                self.scope.cancel()
                return
            self.sent_bytes += sent
            unsent = rest_of(ready, sent)
            if unsent:
                self._unsent, self._unsent_held = unsent, held
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
                    await self._wire.send(self._unsent)
                if scope.cancelled_caught:
                    raise TooSlow(f"the client did not read {size} bytes in time")
                self.sent_bytes += size
                self._sending.give_back(self._unsent_held)
                self._unsent, self._unsent_held = [], 0
                self.flush()

    def _has_room(self) -> bool:
        limits = self._limits
        return (
            not self._unsent
            and len(self._answers) < limits.pipelined_requests_max
            and self._waiting_bytes < limits.pipelined_bytes_max
        )

    async def wait_for_room(self) -> None:
        """Until this client has taken, or been given, enough of its answers to be read further."""
        while not self._has_room():
            self._room = trio.Event()
            await self._room.wait()
        self._room = None

    # ----------------------------------------------------------------------------------------------- requests

    async def read(self, handle: Callable[[Connection, memoryview, int], Awaitable[None] | None]) -> None:
        """Give every request to `handle`, until the client is done. Raises OSError, ProtocolError.

        `handle` gets a view that is good until it returns (or its awaitable does), and how many bytes of the receiving
        budget the request holds: they are its own from then on."""
        limits = self._limits
        buffer = bytearray(SMALL)
        view = memoryview(buffer)
        start = end = 0
        counted = 0  # bytes taken from the budget for the request that is being read
        burst = 0
        began = trio.current_time()  # of the request that is being read, or of the silence
        try:
            while True:
                wanted = HEAD.size
                handled = False
                while end - start >= HEAD.size:
                    size, key = HEAD.unpack_from(buffer, start)
                    if not self._allowed(size, key):
                        raise ProtocolError(f"a request of {size} bytes for API {key}")
                    wanted = size + 4
                    if end - start < wanted:
                        break
                    if not self._has_room():
                        await self.wait_for_room()
                    if key == PRODUCE and not counted:
                        if not self._receiving.take_now(size):
                            await self._receiving.take(size)
                        counted = size
                    held, counted = counted, 0
                    waiting = handle(self, view[start + 4 : start + wanted], held)
                    if waiting is not None:
                        await waiting
                    start += wanted
                    wanted = HEAD.size
                    handled = True
                if handled:
                    began = trio.current_time()
                if start == end:
                    start = end = 0
                    if len(buffer) > SMALL:
                        self._buffers.give_back(buffer)
                        buffer = bytearray(SMALL)
                        view = memoryview(buffer)
                elif wanted > len(buffer) - start:
                    if wanted > COUNTED and not counted:
                        await self._receiving.take(wanted)
                        counted = wanted
                    old = view[start:end]
                    if wanted > len(buffer):
                        large = self._buffers.take(wanted)
                        large[: len(old)] = old
                        self._buffers.give_back(buffer)
                        buffer = large
                        view = memoryview(buffer)
                    else:
                        buffer[: len(old)] = bytes(old)
                    start, end = 0, end - start
                count = self._wire.receive_now(view[end:]) if burst < BURST_BYTES else None
                if count is None:
                    burst = 0
                    deadline = began + (limits.idle_timeout_s if end == 0 else limits.request_timeout_s)
                    if not self.client.authenticated:
                        deadline = min(deadline, self._opened + limits.unauthenticated_timeout_s)
                    with trio.move_on_at(deadline) as scope:
                        count = await self._wire.receive(view[end:])
                    if scope.cancelled_caught or count is None:
                        if end == 0:
                            return
                        raise TooSlow(f"a request of {wanted} bytes did not arrive in time")
                if count == 0:
                    if end > start:
                        raise ProtocolError("the client left in the middle of a request")
                    return
                if end == 0:
                    began = trio.current_time()
                end += count
                burst += count
                self.received_bytes += count
        finally:
            if counted:
                self._receiving.give_back(counted)
            self._buffers.give_back(buffer)

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
