"""A connection between two nodes, cut into messages, with the deadlines that keep a bad peer from costing anything.

Shipper, receiver and election all speak through `Connection`. What it promises:

- A message must be there *as a whole* within the timeout; a byte now and then resets nothing. A large frame gets the
  time that a slow link needs for it on top.
- A send that the peer does not take within the same time ends the connection: after a cancelled send nobody knows
  what went out.
- Everything that a peer's death or nonsense can cause comes out as `ProtocolError` or `ConnectionLost`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from chronik_repl.errors import ChronikError, ProtocolError, first_of
from chronik_repl.replication.messages import Feeder, Frames, Message, encode
from chronik_repl.replication.network import Network, Stream
from chronik_repl.wal.disk import Buffer

LINK_BYTES_PER_S_MIN = 256 * 1024  # the slowest link that large frames are given time for
HANDSHAKE_TIMEOUT_S = 5.0
TOO_SILENT = "the peer said nothing whole for too long"
TOO_DEAF = "the peer took nothing for too long"

Received = Message | Frames


class ConnectionLost(ProtocolError):
    """The peer is gone, silent or too slow. Dial again."""


class Connection:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._feeder = Feeder(frame_bytes_max=0)
        self._timeout_s = HANDSHAKE_TIMEOUT_S
        self._due_at = math.inf  # while someone receives: when a whole message must be there
        self._leaves_by = math.inf  # while someone waits to send: when it must have left
        self._watched = False  # by `watch`: no deadline is set for each call
        self._turns = trio.Lock()  # of those who have to wait to send
        self._stuck = 0  # how many they are
        self.closed = trio.Event()
        self.received_bytes = 0
        self.sent_bytes = 0
        self.last_received_at = trio.current_time()

    def established(self, frame_bytes_max: int, timeout_s: float) -> None:
        """The handshake is done: frames may come, and silence is measured in heartbeats from here on."""
        self._feeder.frame_bytes_max = frame_bytes_max
        self._timeout_s = timeout_s

    async def watch(self) -> None:
        """Beside a session: raises ConnectionLost when a receive or a send takes too long. One task that looks now and
        then costs less than a deadline for each of them."""
        self._watched = True
        try:
            while True:
                now = trio.current_time()
                due_at = self._due_at + self._allowance_s
                if now >= due_at:
                    raise ConnectionLost(TOO_SILENT)
                if now >= self._leaves_by:
                    raise ConnectionLost(TOO_DEAF)
                # No later one can be due before that.
                await trio.sleep_until(min(due_at, self._leaves_by, now + self._timeout_s))
        finally:
            self._watched = False

    @property
    def _allowance_s(self) -> float:
        return self._feeder.needed_bytes / LINK_BYTES_PER_S_MIN

    async def receive(self) -> Received:
        """The next message, or the next run of frames. Raises ConnectionLost at the end, or when it takes too long."""
        feeder = self._feeder
        event = feeder.next_event()
        if event is None:
            self._due_at = trio.current_time() + self._timeout_s
            while event is None:
                await self._receive_more(feeder)
                event = feeder.next_event()
            self._due_at = math.inf
        return event

    async def _receive_more(self, feeder: Feeder) -> None:
        room, missing = feeder.room(), feeder.needed_bytes - feeder.held_bytes
        try:
            if self._watched:
                size = await self._stream.receive_into(room, missing)
            else:
                with trio.fail_at(self._due_at + self._allowance_s):
                    size = await self._stream.receive_into(room, missing)
        except trio.TooSlowError:
            raise ConnectionLost(TOO_SILENT) from None
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError) as error:
            raise _broken(error) from error
        if not size:
            raise ConnectionLost("the peer closed the connection")
        self.received_bytes += size
        self.last_received_at = trio.current_time()
        feeder.fed(size)

    async def send(self, *pieces: Buffer) -> None:
        """All of it, or ConnectionLost; nothing for one who was cancelled. Lets nobody else run where it need not
        wait."""
        await trio.lowlevel.checkpoint_if_cancelled()
        size = sum(map(len, pieces))
        try:
            if self._stuck:
                await self._send_in_turn(pieces, size)
            elif not self._stream.send_now(*pieces):
                await self._send_in_turn((), size)
        except trio.TooSlowError:
            raise ConnectionLost(TOO_DEAF) from None
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError) as error:
            raise _broken(error) from error
        self.sent_bytes += size

    async def _send_in_turn(self, pieces: tuple[Buffer, ...], size: int) -> None:
        allowed_s = self._timeout_s + size / LINK_BYTES_PER_S_MIN
        self._stuck += 1
        try:
            if self._watched and self._stuck == 1:  # by far the most: nobody else waits, and `watch` has the clock
                self._leaves_by = trio.current_time() + allowed_s
                self._turns.acquire_nowait()
                try:
                    await self._stream.send_all(*pieces)
                finally:
                    self._turns.release()
                    self._leaves_by = math.inf
            else:
                with trio.fail_after(allowed_s):
                    async with self._turns:
                        await self._stream.send_all(*pieces)
        finally:
            self._stuck -= 1

    async def say(self, message: Message) -> None:
        await self.send(encode(message))

    def send_now(self, *pieces: Buffer) -> bool:
        """For those who cannot wait. False: not all of it has left; the next `send` waits for the rest, and tells
        what is wrong."""
        try:
            done = self._stream.send_now(*pieces)
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            return False  # whoever receives meets it too
        self.sent_bytes += sum(map(len, pieces))
        return done

    @property
    def stuck(self) -> bool:
        """Does someone wait to send?"""
        return self._stuck > 0

    def say_now(self, message: Message) -> bool:
        """False: it cannot be said now, and may be lost; say it, or something newer, the other way."""
        return not self._stuck and self.send_now(encode(message))

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
        raise ConnectionLost(f"cannot connect to {address}: {_why(error)}") from error


def _why(error: OSError) -> str:
    """trio says that all its attempts failed; what they met stands behind that."""
    cause = error.__cause__
    if isinstance(cause, BaseExceptionGroup):
        cause = first_of(cause)
    met = cause if isinstance(cause, OSError) else error
    return os.strerror(met.errno) if met.errno is not None and met.errno > 0 else met.strerror or str(met)
