"""The simulated network: `Network` for every node of a cluster, over one `Fabric` with all troubles of a wire.

A connection is two pipes. Bytes inside a pipe are never reordered, duplicated or changed, as TCP promises; everything
else is chance: how long they take, how they are cut into receives, whether a connection overtakes another. Troubles:

    cut(a, b)        bytes from a to b wait, as retransmissions do, until `heal`; only this way
    freeze(a)        a's process stands still at its next call; `thaw` lets it go on
    kill(a)          kill -9: the kernel closes its sockets, what was sent still arrives
    unplug(a)        a power cut: silence. Its peers find out when they send to the machine after it is back
    sever(...)       a connection breaks at any byte of what is in flight

Every control message is decoded as it is sent and given to `said`: the judge hears what each node claims, when it does.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Awaitable, Callable

import trio

from chronik_repl.replication.messages import Feeder, Frames, Message
from chronik_repl.replication.network import Stream
from tests.simulation.clock import SimClock, Timer, ring_all

WINDOW_BYTES = 6 * 1024  # small, so that a slow link blocks its sender and rings overflow
FRAME_BYTES_MAX = 1 << 24

Said = Callable[[str, str, int, Message], None]  # from, to, connection, message


class Pipe:
    """One direction of a connection."""

    def __init__(self, fabric: Fabric, source: str, target: str, number: int) -> None:
        self.fabric, self.source, self.target, self.number = fabric, source, target, number
        self.queue: deque[tuple[float, bytes]] = deque()
        self.held_bytes = 0
        self.ended = False  # after what is queued: the end of the stream
        self.broken = ""  # at once: why
        self.deaf = False  # nobody is there any more, and nobody says so
        self.waiting: dict[Timer, None] = {}  # for a change of this pipe
        self._last_arrival = 0.0
        self._sniffer: Feeder | None = Feeder(FRAME_BYTES_MAX)

    def put(self, data: bytes) -> None:
        if self._sniffer is not None:
            self._listen_in(self._sniffer, data)
        if self.deaf:
            return
        at = max(self._last_arrival, self.fabric.clock.now + self.fabric.delay_s(self.source, self.target))
        self._last_arrival = at
        self.queue.append((at, data))
        self.held_bytes += len(data)
        self.wake()

    def _listen_in(self, sniffer: Feeder, data: bytes) -> None:
        sniffer.feed(data)
        while (event := sniffer.next_event()) is not None:
            if not isinstance(event, Frames):
                self.fabric.said(self.source, self.target, self.number, event)
            elif self.fabric.shipped is not None:
                self.fabric.shipped(self.source, self.target, event.view)

    def wake(self) -> None:
        if self.waiting:
            ring_all(self.waiting)

    def break_off(self, why: str) -> None:
        """What is in flight is lost from some byte on."""
        if self.queue:
            kept = self.fabric.rng.randrange(len(self.queue) + 1)
            at, data = self.queue[kept - 1] if kept else (0.0, b"")
            self.queue = deque(list(self.queue)[:kept])
            if kept and len(data) > 1 and self.fabric.rng.random() < 0.7:
                self.queue[-1] = (at, data[: self.fabric.rng.randrange(1, len(data))])
            self.held_bytes = sum(len(piece) for _, piece in self.queue)
        self.broken = why
        self._sniffer = None
        self.wake()


class SimStream:
    def __init__(self, fabric: Fabric, here: str, outgoing: Pipe, incoming: Pipe) -> None:
        self._fabric, self._here, self._clock = fabric, here, fabric.clock
        self._outgoing, self._incoming = outgoing, incoming
        self._unsent = b""
        self.closed = False

    async def send_all(self, *pieces: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        await self._fabric.standing(self._here)
        self._put(*pieces)
        pipe = self._outgoing
        while pipe.held_bytes > WINDOW_BYTES and not pipe.broken and not self.closed:
            await self._clock.wait(math.inf, pipe.waiting)
            await self._fabric.standing(self._here)
        if pipe.broken:
            raise trio.BrokenResourceError(pipe.broken)

    def send_now(self, *pieces: bytes | bytearray | memoryview) -> bool:
        if self._fabric.is_frozen(self._here):  # it stands still from this call on
            self._unsent += b"".join(pieces)
            return False
        self._put(*pieces)
        return self._outgoing.held_bytes <= WINDOW_BYTES

    def _put(self, *pieces: bytes | bytearray | memoryview) -> None:
        if self.closed:
            raise trio.ClosedResourceError
        pipe = self._outgoing
        if pipe.broken:
            raise trio.BrokenResourceError(pipe.broken)
        if pipe.deaf and self._fabric.rings_back(self._here, pipe.target):
            pipe.broken = "reset by a machine that was restarted"
            raise trio.BrokenResourceError(pipe.broken)
        data, self._unsent = self._unsent + b"".join(pieces), b""
        if data:
            pipe.put(data)

    async def receive_into(self, buffer: memoryview, least: int = 1) -> int:
        data = await self.receive_some(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint_if_cancelled()
        pipe = self._incoming
        while True:
            if self._fabric.is_frozen(self._here):
                await self._fabric.standing(self._here)
            if self.closed:
                raise trio.ClosedResourceError
            wait_until = math.inf
            if pipe.queue:
                if not self._fabric.is_cut(pipe.source, pipe.target):
                    wait_until, data = pipe.queue[0]
                    if wait_until <= self._clock.now:
                        return self._take(pipe, data, max_bytes)
            elif pipe.broken:
                raise trio.BrokenResourceError(pipe.broken)
            elif pipe.ended and not self._fabric.is_cut(pipe.source, pipe.target):
                return b""
            await self._clock.wait(wait_until, pipe.waiting)

    def _take(self, pipe: Pipe, data: bytes, max_bytes: int | None) -> bytes:
        pipe.queue.popleft()
        size = len(data)
        if max_bytes is not None:
            size = min(size, max_bytes)
        if size > 1 and self._fabric.rng.random() < self._fabric.split:
            size = self._fabric.rng.randrange(1, size)
        if size < len(data):
            pipe.queue.appendleft((self._clock.now, data[size:]))
        pipe.held_bytes -= size
        pipe.wake()
        return data[:size]

    async def aclose(self) -> None:
        if not self.closed:
            self.closed = True
            self._fabric.forget(self)
            if not self._outgoing.broken:
                self._outgoing.ended = True
            self._outgoing.wake()
            self._incoming.break_off("closed here")
        await trio.lowlevel.checkpoint()

    def die(self, *, silently: bool) -> None:
        """The process behind this end is gone."""
        self.closed = True
        self._fabric.forget(self)
        if silently:
            self._outgoing.deaf = True
            self._incoming.deaf = True
            self._outgoing._sniffer = None
        else:
            self._outgoing.ended = True
            if self._fabric.is_cut(self._here, self._incoming.source):
                self._incoming.deaf = True  # nobody hears of it while that way is cut
            else:
                self._incoming.break_off("reset by peer")
        self._outgoing.wake()
        self._incoming.wake()


class Fabric:
    def __init__(self, rng: random.Random, said: Said) -> None:
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, SimClock)
        self.clock = clock
        self.rng = rng
        self.said = said
        self.shipped: Callable[[str, str, memoryview], None] | None = None
        self.split = 0.1  # how often a receive ends in mid-message
        self.base_delay_s = 0.0003
        self.slow: dict[tuple[str, str], float] = {}  # extra delay of a link
        self._cuts: set[tuple[str, str]] = set()
        self._frozen: dict[str, trio.Event] = {}
        self._down: set[str] = set()
        self._boots: dict[str, int] = {}
        self._listeners: dict[str, tuple[str, Callable[[Stream], Awaitable[object]], trio.Nursery]] = {}
        self._streams: dict[SimStream, None] = {}
        self._moved = trio.lowlevel.ParkingLot()  # something about the topology changed
        self._connections = 0
        self.dialled: dict[str, tuple[float, float]] = {}  # when a node last did, and before that

    def of(self, node: str) -> SimNetwork:
        return SimNetwork(self, node)

    # Troubles

    def cut(self, source: str, target: str) -> None:
        self._cuts.add((source, target))

    def heal(self, source: str, target: str) -> None:
        self._cuts.discard((source, target))
        self._wake_all()

    def heal_all(self) -> None:
        self._cuts.clear()
        self.slow.clear()
        self._wake_all()

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self._cuts

    def is_clear(self, source: str, target: str) -> bool:
        """Will what is sent now arrive at once?"""
        return not self.is_cut(source, target) and (source, target) not in self.slow and target not in self._frozen

    def freeze(self, node: str) -> None:
        self._frozen.setdefault(node, trio.Event())

    def thaw(self, node: str) -> None:
        if (event := self._frozen.pop(node, None)) is not None:
            event.set()

    def is_frozen(self, node: str) -> bool:
        return node in self._frozen

    def kill(self, node: str) -> None:
        self._gone(node, silently=False)

    def unplug(self, node: str) -> None:
        self._down.add(node)
        self._gone(node, silently=True)

    def boot(self, node: str) -> None:
        """The machine is there again."""
        self._down.discard(node)
        self._boots[node] = self._boots.get(node, 0) + 1
        self._wake_all()

    def sever(self) -> str:
        """One connection breaks. Returns between whom, or "" where there is none."""
        living = [s for s in self._streams if not s.closed]
        if not living:
            return ""
        stream = self.rng.choice(living)
        stream._outgoing.break_off("severed")
        stream._incoming.break_off("severed")
        return f"{stream._outgoing.source}-{stream._outgoing.target}"

    def _gone(self, node: str, *, silently: bool) -> None:
        self.thaw(node)
        for address in [a for a, (who, _, _) in self._listeners.items() if who == node]:
            del self._listeners[address]
        for stream in [s for s in self._streams if s._here == node]:
            stream.die(silently=silently)
        self._wake_all()

    # What streams ask

    def delay_s(self, source: str, target: str) -> float:
        return self.base_delay_s * self.rng.uniform(0.3, 3.0) + self.slow.get((source, target), 0.0)

    async def standing(self, node: str) -> None:
        while (event := self._frozen.get(node)) is not None:
            await event.wait()

    def rings_back(self, source: str, target: str) -> bool:
        return target not in self._down and not self.is_cut(source, target) and not self.is_cut(target, source)

    def forget(self, stream: SimStream) -> None:
        self._streams.pop(stream, None)

    def _wake_all(self) -> None:
        self._moved.unpark_all()
        for stream in self._streams:
            stream._incoming.wake()
            stream._outgoing.wake()

    async def connect(self, here: str, address: str) -> SimStream:
        """Refused where a machine is up and nobody listens; silence where it is down or cut off."""
        there = address.partition(":")[0]
        now = self.clock.now
        if self.dialled.get(here, (0.0, -1.0))[1] != now:
            self.dialled[here] = (self.dialled.get(here, (0.0, -1.0))[1], now)
        await self.clock.wait(now + self.delay_s(here, there))
        while here == there or there in self._down or self.is_cut(here, there) or self.is_cut(there, here):
            await self._moved.park()
        await self.standing(here)
        if address not in self._listeners:
            raise ConnectionRefusedError(f"{address}: connection refused")
        who, handler, nursery = self._listeners[address]
        self._connections += 1
        out, back = Pipe(self, here, who, self._connections), Pipe(self, who, here, self._connections)
        near, far = SimStream(self, here, out, back), SimStream(self, who, back, out)
        self._streams[near] = self._streams[far] = None
        nursery.start_soon(handler, far)
        return near

    async def serve(
        self,
        here: str,
        address: str,
        handler: Callable[[Stream], Awaitable[object]],
        task_status: trio.TaskStatus[str],
    ) -> None:
        if address in self._listeners:
            raise OSError(f"{address}: address in use")
        async with trio.open_nursery() as nursery:
            self._listeners[address] = (here, handler, nursery)
            try:
                task_status.started(address)
                await trio.sleep_forever()
            finally:
                if self._listeners.get(address, ("", None, None))[2] is nursery:
                    del self._listeners[address]


class SimNetwork:
    """The network as one node sees it. Addresses are "name:port"."""

    def __init__(self, fabric: Fabric, node: str) -> None:
        self._fabric, self._node = fabric, node

    async def dial(self, address: str) -> Stream:
        return await self._fabric.connect(self._node, address)

    async def listen(
        self,
        address: str,
        handler: Callable[[Stream], Awaitable[object]],
        *,
        task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        await self._fabric.serve(self._node, address, handler, task_status)
