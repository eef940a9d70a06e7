"""A connection between two nodes, cut into messages, with the deadlines that keep a bad peer from costing anything.

Shipper, receiver and election all speak through `Connection`. What it promises:

- A message must be there *as a whole* within the timeout; a byte now and then resets nothing. A large frame gets the
  time that a slow link needs for it on top.
- A send that the peer does not take within the same time ends the connection: after a cancelled send nobody knows
  what went out.
- Everything that a peer's death or nonsense can cause comes out as `ProtocolError` or `ConnectionLost`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio

from chronik_repl.errors import ChronikError, ProtocolError
from chronik_repl.replication.messages import Feeder, Frames, Message, encode
from chronik_repl.replication.network import Network, Stream
from chronik_repl.wal.disk import Buffer

RECEIVE_BYTES_MIN = 16 * 1024  # what is asked for grows while it is filled: a large buffer costs even when it is not
RECEIVE_BYTES_MAX = 1024 * 1024
LINK_BYTES_PER_S_MIN = 256 * 1024  # the slowest link that large frames are given time for
HANDSHAKE_TIMEOUT_S = 5.0

Received = Message | Frames


class ConnectionLost(ProtocolError):
    """The peer is gone, silent or too slow. Dial again."""


class Connection:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._feeder = Feeder(frame_bytes_max=0)
        self._timeout_s = HANDSHAKE_TIMEOUT_S
        self._deadline = trio.current_time() + self._timeout_s
        self._sending = trio.Lock()
        self._receive_bytes = RECEIVE_BYTES_MIN
        self.closed = trio.Event()
        self.received_bytes = 0
        self.sent_bytes = 0
        self.last_received_at = trio.current_time()

    def established(self, frame_bytes_max: int, timeout_s: float) -> None:
        """The handshake is done: frames may come, and silence is measured in heartbeats from here on."""
        self._feeder.frame_bytes_max = frame_bytes_max
        self._timeout_s = timeout_s
        self._deadline = trio.current_time() + timeout_s

    async def receive(self) -> Received:
        """The next message, or the next run of frames. Raises ConnectionLost at the end, or when it takes too long."""
        while True:
            event = self._feeder.next_event()
            if event is not None:
                self._deadline = trio.current_time() + self._timeout_s
                return event
            allowance_s = self._feeder.needed_bytes / LINK_BYTES_PER_S_MIN
            try:
                with trio.fail_at(self._deadline + allowance_s):
                    data = await self._stream.receive_some(self._receive_bytes)
            except trio.TooSlowError:
                raise ConnectionLost("the peer said nothing whole for too long") from None
            except (trio.BrokenResourceError, trio.ClosedResourceError, OSError) as error:
                raise _broken(error) from error
            if not data:
                raise ConnectionLost("the peer closed the connection")
            if len(data) == self._receive_bytes:
                self._receive_bytes = min(RECEIVE_BYTES_MAX, 2 * self._receive_bytes)
            elif len(data) < self._receive_bytes // 4:
                self._receive_bytes = max(RECEIVE_BYTES_MIN, self._receive_bytes // 2)
            self.received_bytes += len(data)
            self.last_received_at = trio.current_time()
            self._feeder.feed(data)

    async def send(self, data: Buffer) -> None:
        """All of it, or ConnectionLost."""
        allowance_s = self._timeout_s + len(data) / LINK_BYTES_PER_S_MIN
        try:
            with trio.fail_after(allowance_s):
                async with self._sending:
                    await self._stream.send_all(data)
        except trio.TooSlowError:
            raise ConnectionLost("the peer took nothing for too long") from None
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError) as error:
            raise _broken(error) from error
        self.sent_bytes += len(data)

    async def say(self, message: Message) -> None:
        await self.send(encode(message))

    async def aclose(self) -> None:
        """At once: nothing that matters is left to say when a session ends."""
        self.closed.set()
        with trio.CancelScope() as scope:
            scope.cancel()
            await self._stream.aclose()


def _broken(error: BaseException) -> ConnectionLost:
    return ConnectionLost(f"the connection broke: {error.__cause__ or error}")


class Together:
    """Tasks of one session: when one of them fails or returns, all end; what went wrong first comes out, and it alone.

    (A nursery alone would raise a group in which the first failure stands beside what followed from it.)
    """

    def __init__(self) -> None:
        self._nursery_manager = trio.open_nursery()
        self._first: ChronikError | None = None

    async def __aenter__(self) -> Together:
        self._nursery = await self._nursery_manager.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await self._nursery_manager.__aexit__(*raised)
        if self._first is not None:
            raise self._first

    def start(self, task: Callable[..., Awaitable[object]], *arguments: object, ends_all: bool = True) -> None:
        self._nursery.start_soon(self._run, task, arguments, ends_all)

    async def _run(self, task: Callable[..., Awaitable[object]], arguments: tuple[object, ...], ends_all: bool) -> None:
        try:
            await task(*arguments)
        except ChronikError as error:
            if self._first is None:
                self._first = error
            ends_all = True
        if ends_all:
            self._nursery.cancel_scope.cancel()


async def dial(network: Network, address: str) -> Connection:
    """Within the handshake's time, which also holds for the answer to the first message. Raises ConnectionLost."""
    try:
        with trio.fail_after(HANDSHAKE_TIMEOUT_S):
            return Connection(await network.dial(address))
    except trio.TooSlowError:
        raise ConnectionLost(f"no connection to {address} within {HANDSHAKE_TIMEOUT_S:.0f} s") from None
    except OSError as error:
        raise ConnectionLost(f"cannot connect to {address}: {error}") from error
