"""The role of a follower: one session with one leader, from its truncation to its end.

What comes in: `TR` first, always. Before it nothing of the leader is believed; after it this log is a part of the
leader's. Then frames, checked and appended as they come; `CM` and heartbeats, which carry the high watermark; and
segments that were asked for again. What goes out: an ack in the very step in which a group is known to be durable here,
with the chain value there; an answer to each heartbeat.

A session belongs to a promise. When that promise is given to another, `end` closes the session in the same step:
nothing that arrives in it is appended or acked any more, though the bytes may already be in this process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import trio

from chronik_repl.errors import CorruptLog, DiskFull, OutOfRange, ProtocolError
from chronik_repl.positions import Checksum, Epoch, Position
from chronik_repl.replication import epochs
from chronik_repl.replication.local import LiveLeader, Local
from chronik_repl.replication.messages import (
    Ack,
    Committed,
    Frames,
    Handshake,
    Heartbeat,
    HeartbeatAnswer,
    SegmentAgain,
    Truncate,
)
from chronik_repl.replication.session import Connection, Together
from chronik_repl.wal.changes import Member
from chronik_repl.wal.segment import NAME

ASKS_MAX = 1000
PENDING_BYTES_MAX = 32 * 1024 * 1024  # appended and not yet durable; beyond that the leader waits


class Diverged(ProtocolError):
    """This log is not a part of the leader's and may not be made one by cutting. Reported on both sides."""


class Following:
    def __init__(
        self, local: Local, connection: Connection, handshake: Handshake, on_met: Callable[[Following], None]
    ) -> None:
        self._local = local
        self._on_met = on_met
        self._log = local.log
        self.connection = connection
        self._handshake = handshake
        self.epoch = Epoch(handshake.epoch)
        self.promise = epochs.Promise(handshake.epoch, handshake.node_id, handshake.directory_id)
        self.leader = Member(
            handshake.node_id,
            handshake.directory_id,
            handshake.replication_address,
            handshake.kafka_address,
            handshake.http_address,
            handshake.rack,
        )
        self.ended = False
        self.surrendered = False  # the connection outlives the session
        self.met = False  # this session's truncation is done: the leader may be believed
        self._scope = trio.CancelScope()
        self._told_watermark = Position(0)  # the leader's; ours follows as far as we are durable
        self._drained = trio.Event()
        self._drained_end = Position(0)
        self._drain_wanted = False
        self._asks: list[tuple[str, str]] = []
        self._asked = trio.Event()
        self._ack_due = trio.Event()
        self._tasks: Together | None = None
        self._asked_again: set[Position] = set()  # damaged segments, asked for once a session
        self._mending: trio.MemorySendChannel[bytes] | None = None  # to the one that is coming now
        self._mending_bytes = 0  # of it that are still to come

    def end(self) -> None:
        """Nothing of this session takes effect after this."""
        self.ended = True
        self._scope.cancel()

    def live(self) -> LiveLeader | None:
        silent_s = trio.current_time() - self.connection.last_received_at
        if self.ended or not self.met or silent_s >= self._local.settings.replication_heartbeat_timeout_secs:
            return None
        return LiveLeader(self.leader, self.epoch)

    async def run(self) -> None:
        """Until the leader goes, breaks the protocol, or `end`. Raises ProtocolError, or Diverged."""
        with self._scope:
            if self.ended:
                return
            first = await self.connection.receive()
            if not isinstance(first, Truncate) or first.epoch != self.epoch:
                raise ProtocolError(f"a session begins with TR of epoch {self.epoch}, not with {first!r:.80}")
            with trio.CancelScope(shield=True):  # cut wholly or not at all; whoever ends us waits for that
                if not self.ended:
                    await self._meet(first)
                    self._log.met_leader(Position(max(self._handshake.log_end, first.position)))
            if self.ended:
                return
            self.met = True
            self._on_met(self)
            async with Together() as tasks:
                self._tasks = tasks
                tasks.start(self.connection.watch)
                tasks.start(self._take)
                tasks.start(self._acknowledge)
                tasks.start(self._ask)
                tasks.start(self._ask_again, ends_all=False)

    # Meeting

    async def _meet(self, told: Truncate) -> None:
        """Make this log a part of the leader's, or refuse."""
        log, position = self._log, Position(told.position)
        await self._local.passport.join_cluster(self._handshake.cluster_id)
        if told.anew or log.cluster_id is None:
            await self._begin_anew(told)
            return
        if position > log.end:
            raise ProtocolError(f"TR to {position}, but this log ends at {log.end}")
        try:
            ours = await log.checksum_at(position)
        except OutOfRange as error:
            raise ProtocolError(f"TR to {position}: {error}") from error
        difference = epochs.parity(position, told.checksum, ours)
        if difference:
            await self._diverge(f"this log is not the leader's: {difference}")
        if position < log.end:
            loss = epochs.accepted_loss(self._handshake.history, self._local.summary())
            if not epochs.may_truncate(position, False, log.committed.value, loss):
                await self._diverge(
                    f"the leader wants this log cut to {position}, below the high watermark {log.committed.value}: "
                    "what was committed here is not in its log"
                )
            self._local.say(
                "warning" if loss else "info",
                f"log truncated from {log.end} to {position} by leader {self.leader.node_id}"
                + (": the operator accepted this loss; what is cut is kept in lost/" if loss else ""),
                epoch=self.epoch,
            )
            if position == log.start:  # nothing will be left of it
                await self._local.passport.forget_log()
            await log.truncate(position, lost=loss)

    async def _begin_anew(self, told: Truncate) -> None:
        log, position = self._log, Position(told.position)
        if log.cluster_id is not None:
            loss = epochs.accepted_loss(self._handshake.history, self._local.summary())
            if not epochs.may_truncate(position, True, log.committed.value, loss):
                await self._diverge(
                    f"the leader wants this log to begin anew at {position}, below the high watermark "
                    f"{log.committed.value}: what was committed here is not in its log"
                )
            self._local.say(
                "warning",
                f"the leader's log starts at {position} and this one ended at {log.end}: it begins anew from there",
                leader=self.leader.node_id,
            )
        await self._local.passport.forget_log()
        await log.begin_at(position, Checksum(told.checksum), self._handshake.cluster_id)

    async def _diverge(self, reason: str) -> None:
        log = self._log
        await self.connection.say(
            HeartbeatAnswer(0, log.durable.value, log.durable_checksum, log.committed.value, diverged=reason)
        )
        raise Diverged(reason)

    # Taking

    async def _take(self) -> None:
        log, connection = self._log, self.connection
        while True:
            event = await connection.receive()
            if self.ended:
                return
            if isinstance(event, Frames):
                if self._mending is not None:
                    event = await self._mend(event)
                try:
                    taken = log.append_received(event.view)
                except DiskFull as error:
                    self._local.say("error", f"the disk is full: nothing more is taken from the leader: {error}")
                    raise ProtocolError(f"the disk is full: {error}") from error
                if taken != len(event.view):
                    raise ProtocolError(f"{len(event.view) - taken} bytes of a run of frames are no frames")
                if log.end - log.durable.value > PENDING_BYTES_MAX:
                    await log.durable.wait(Position(log.end - PENDING_BYTES_MAX))
            elif isinstance(event, Committed):
                self._believe(event.position, event.drained)
            elif isinstance(event, Heartbeat):
                self._believe(event.high_watermark, event.drained)
                await self._remember()
                await connection.say(
                    HeartbeatAnswer(event.sent_ms, log.durable.value, log.durable_checksum, log.committed.value)
                )
                await self._ask_again()
            elif isinstance(event, SegmentAgain):
                self._begin_mending(event)
            else:
                raise ProtocolError(f"a {type(event).__name__} has no business in a session")

    def _believe(self, high_watermark: int, drained: int) -> None:
        self._told_watermark = Position(max(self._told_watermark, high_watermark))
        self._show()
        if drained:
            self._drained_end = Position(drained)
            self._drained.set()

    def _show(self) -> None:
        """What is committed may be read here once it is durable here."""
        self._log.commit_to(min(self._told_watermark, self._log.durable.value))

    async def _acknowledge(self) -> None:
        """Acks that could not be said in the step in which something became durable, and the first one."""
        watchers = self._log.durable.watchers
        watchers.append(self)
        try:
            while True:
                self._ack_due = trio.Event()
                await self._remember()
                self._show()
                await self.connection.say(self._ack())
                await self._ack_due.wait()
        finally:
            watchers.remove(self)

    def passed(self, durable_end: Position) -> None:
        """The log's durable end moved: the leader waits for nothing but to hear of it."""
        if not self.ended:
            self._show()
            if not (self._local.passport.log_begun and self.connection.say_now(self._ack())):
                self._ack_due.set()

    def failed(self, error: BaseException) -> None:
        """Whoever runs the log ends this process."""

    async def _remember(self) -> None:
        """Before anything is acked: from now on an empty wal/ is a lost log, not a new one."""
        if self._log.lasting:
            await self._local.passport.begin_log()

    def _ack(self) -> Ack:
        return Ack(self._log.durable.value, self._log.durable_checksum, self._drain_wanted)

    # What clients ask of any node, and only the leader can do. Its answer stands in the log.

    def ask(self, *, ids: str = "", topic: str = "") -> None:
        """For producer ids, under a word of the asker's; for a topic that is to be made on first use."""
        if len(self._asks) < ASKS_MAX:
            self._asks.append((ids, topic))
            self._asked.set()

    async def _ask(self) -> None:
        log = self._log
        while True:
            await self._asked.wait()
            self._asked = trio.Event()
            asks, self._asks = self._asks, []
            await self._remember()
            for ids, topic in asks:
                await self.connection.say(Ack(log.durable.value, log.durable_checksum, self._drain_wanted, ids, topic))

    # A promotion of this node

    async def drain_leader(self) -> Position:
        """Ask the living leader to stop accepting and to send the rest. Returns the end of its log, durable here."""
        self._drain_wanted = True
        await self._remember()
        await self.connection.say(self._ack())
        await self._drained.wait()
        await self._log.durable.wait(self._drained_end)
        return self._drained_end

    # Damage of our own

    async def _ask_again(self) -> None:
        """Sealed segments in which rot was found are asked for, each once a session."""
        for damage in self._log.damage:
            found = NAME.search(damage.file)
            if found is None or (start := Position(int(found[1]))) in self._asked_again:
                continue
            self._asked_again.add(start)
            self._local.say("warning", f"{damage.file} is damaged: asking the leader for it", position=damage.start)
            await self.connection.say(SegmentAgain(start))

    def _begin_mending(self, told: SegmentAgain) -> None:
        """The leader answers: the frames from start to end come next, or it cannot read them either."""
        start = Position(told.start)
        if start not in self._asked_again or self._mending is not None:
            raise ProtocolError(f"a segment at {start} that nobody asked for")
        if told.bad:
            self._local.say(
                "error",
                f"the segment at {start} cannot be repaired: the leader's is bad too: {told.bad}. `chronik wal verify` "
                "on each node shows who has it whole: promote that one",
            )
            return
        if told.end <= start:
            raise ProtocolError(f"a segment from {start} to {told.end}")
        assert self._tasks is not None
        self._mending, pieces = trio.open_memory_channel[bytes](0)
        self._mending_bytes = told.end - start
        self._tasks.start(self._replace, start, pieces, ends_all=False)

    async def _mend(self, event: Frames) -> Frames:
        """Give the segment its part of these frames; what is left is of the stream."""
        assert self._mending is not None
        part = event.view[: self._mending_bytes]
        self._mending_bytes -= len(part)
        with suppress(trio.BrokenResourceError):  # refused already: the rest of it passes by
            await self._mending.send(bytes(part))
        if not self._mending_bytes:
            self._mending.close()
            self._mending = None
        return Frames(event.view[len(part) :])

    async def _replace(self, start: Position, pieces: trio.MemoryReceiveChannel[bytes]) -> None:
        async def come() -> AsyncIterator[bytes]:
            async for piece in pieces:
                yield piece

        async with pieces:
            try:
                await self._log.replace_segment(start, come())
            except (CorruptLog, OutOfRange) as error:
                self._local.say(
                    "error", f"the segment at {start} could not be repaired: {error}; the next session asks again"
                )
            else:
                self._local.say("info", f"the segment at {start} is repaired with the leader's bytes")
