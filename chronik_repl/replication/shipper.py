"""One follower as its leader serves it: dial, meet, catch up, stream, and again after any failure.

A `Link` lives as long as the leadership and knows one address. Its session runs two tasks. The sender is the only one
that writes: frames first from the log's files, in large pieces and only below the leader's durable end (*catch-up*);
once the position is in the ring's window, from the ring (*streaming*); back to the files when the ring has lapped it.
Before each send it adds what else is due: the high watermark if it moved, heartbeats. The reader takes
acks, compares the chain value of each with our own, and reports them upwards.

Nothing here touches another link. A link that fails dials again: at once, then after 0.1 s, doubling, with jitter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

import trio

from chronik_repl.errors import ChronikError, CorruptLog, OutOfRange, ProtocolError
from chronik_repl.positions import NOBODY, Checksum, Epoch, NodeId, Position
from chronik_repl.replication import epochs
from chronik_repl.replication.local import Local, answering_member, described
from chronik_repl.replication.messages import (
    Ack,
    Answer,
    Committed,
    Handshake,
    HandshakeAnswer,
    Heartbeat,
    HeartbeatAnswer,
    Purpose,
    SegmentAgain,
    Truncate,
    encode,
)
from chronik_repl.replication.ring import Lapped, Ring, Run
from chronik_repl.replication.runs import PIECE_BYTES, Files, check_frames
from chronik_repl.replication.session import HANDSHAKE_TIMEOUT_S, Connection, Together, dial
from chronik_repl.standing import FollowerState
from chronik_repl.wal.changes import Member
from chronik_repl.wal.seam import Buffer

CHECKED_BYTES = 64 * 1024 * 1024
FIRST_DELAY_S = 0.1
WATERMARK_DELAY_S = 0.002  # how long a new high watermark may wait for frames to travel with
WATERMARK_UNDER_LOAD_S = 0.01  # the same where frames were sent meanwhile
TURN_BYTES = 1024 * 1024  # sent without waiting, before others get a turn


class Leading(Protocol):
    """What a link asks of its leadership."""

    epoch: Epoch

    def acked(self, link: Link, position: Position, drain: bool) -> None: ...

    def give_ids(self, asked: str) -> None:
        """Producer ids for a follower's clients."""

    def make_topic(self, name: str) -> None:
        """A follower's client uses it for the first time."""

    def meets_promise(self, promise: epochs.Promise) -> None:
        """A peer has promised a later epoch, or this one to another node."""

    def changed(self, link: Link) -> None:
        """Its state changed: it may have become live, or ready to be a member."""

    def twin(self, link: Link) -> Link | None:
        """Another live link to the same directory."""

    def diverges(self, link: Link, reason: str) -> None: ...

    def meets(self, link: Link) -> None:
        """A session begins whose chain was compared."""

    def is_removed(self, who: epochs.Identity) -> bool: ...

    def hand_over(self, connection: Connection, asked: Handshake) -> None:
        """The follower asks for our promise over this session."""

    @property
    def drained(self) -> Position: ...


class HandedOver(ProtocolError):
    """The connection is someone else's now."""


class Link:
    def __init__(self, local: Local, leading: Leading, address: str, *, listed: bool) -> None:
        self._local = local
        self._log = local.log
        self._leading = leading
        self.address = address
        self.listed = listed  # asked for by the operator: whoever answers there is to be a member
        self.invited = False  # by command: also one that was removed before
        self.state: FollowerState = "connecting"
        self.detail = ""
        self.identity: epochs.Identity | None = None
        self.member: Member | None = None  # as it last answered
        self.durable_end = Position(0)
        self.caught_up = False  # has durably what there was when it began to stream, in this session
        self.ring: Ring | None = None
        self.ring_drops = self.sent_bytes = self.acks = self.reconnects = 0
        self.truncations = self.parity_mismatches = 0
        self.parity_position = Position(0)
        self._progressed = False  # this session brought the follower further, or it has all
        self._stuck_at = Position(-1)  # where the last session began, if it brought nothing
        self._position = Position(0)  # sent up to here
        self._joined_at = Position(0)  # where it last came from the files to the ring
        self._parked: trio.Event | None = None
        self._queue: deque[bytes] = deque()  # control messages that are due
        self._asked_again: deque[Position] = deque()  # segments
        self._watermark_told = (-1, 0)
        self._watermark_due = False
        self._quiet_at = Position(-1)  # what was sent when the watermark was last to be told
        self._given_away: Connection | None = None  # a session's connection that is someone else's now
        self._scope = trio.CancelScope()

    @property
    def node_id(self) -> NodeId:
        return NodeId(self.identity.node_id) if self.identity else NOBODY

    @property
    def live(self) -> bool:
        return self.state in ("catch-up", "streaming")

    @property
    def shipped_to(self) -> Position:
        """What this follower still needs begins here."""
        return self.durable_end

    def wake(self) -> None:
        """The sender has something to look at."""
        if self._parked is not None:
            self._parked.set()
            self._parked = None

    def stop(self) -> None:
        self._scope.cancel()

    async def run(self) -> None:
        """For as long as this leadership lasts."""
        failures = 0
        settings = self._local.settings
        with self._scope:
            while True:
                self._progressed = False
                try:
                    await self._session()
                except HandedOver:
                    await trio.sleep(HANDSHAKE_TIMEOUT_S)  # by then our leadership has ended, or it was not granted
                except ChronikError as error:
                    self._fails(error)
                failures = 0 if self._progressed else failures + 1
                self.reconnects += 1
                if failures:
                    longest = settings.replication_reconnect_delay_secs
                    delay = min(longest, FIRST_DELAY_S * 2 ** min(failures - 1, 20))
                    await trio.sleep(delay * self._local.rng.uniform(0.5, 1.0))
                else:
                    await trio.lowlevel.checkpoint()

    def _fails(self, error: ChronikError) -> None:
        text = str(error)
        if self.live:
            name = f"follower {self.node_id} at {self.address}"
            self._local.say("warning", f"lost {name}: {text}")
        self._becomes("connecting" if self.state not in ("refused", "diverged") else self.state, text)

    def _becomes(self, state: FollowerState, detail: str = "") -> None:
        if state == "refused" and detail != self.detail:
            self._local.say("error", f"{self.address} is refused: {detail}")
        changed = state != self.state
        self.state, self.detail = state, detail
        if changed:
            self._leading.changed(self)

    # One session

    async def _session(self) -> None:
        connection = await dial(self._local.network, self.address)
        try:
            await connection.say(self._local.handshake(Purpose.SHIP, self._leading.epoch))
            answer = await connection.receive()
            if not isinstance(answer, HandshakeAnswer):
                raise ProtocolError(f"the answer to a handshake is HA, not {type(answer).__name__}")
            self._judge(answer)
            settings = self._local.settings
            connection.established(settings.max_frame_bytes, settings.replication_heartbeat_timeout_secs)
            await self._meet(connection, answer)
            await self._ship(connection)
        finally:
            self.ring = None
            self.caught_up = False
            if connection is not self._given_away:  # also when we are cancelled before HandedOver comes this far
                await connection.aclose()

    def _judge(self, answer: HandshakeAnswer) -> None:
        """Raises where there can be no session."""
        who = epochs.Identity(answer.node_id, answer.directory_id)
        if answer.status == Answer.PROMISED:
            promise = epochs.Promise(answer.promised_epoch, answer.promised_node, answer.promised_directory)
            mine = epochs.Promise(self._leading.epoch, *self._local.me)
            if not epochs.may_grant(promise, mine):
                self._leading.meets_promise(promise)
            raise ProtocolError(answer.reason)
        refusal = ""
        if answer.status not in (Answer.OK, Answer.NOT_NOW):
            refusal = answer.reason or answer.status.name
        elif who.directory_id == self._local.me.directory_id:
            refusal = (
                f"it shows this node's own directory id {who.directory_id}: one of the two is a copy. Stop the copy; "
                "`chronik backup` makes one that may run"
            )
        elif who.node_id == self._local.me.node_id:
            refusal = (
                f"it has this node's own CHRONIK_NODE_ID {who.node_id}: give it another, in a directory of its own"
            )
        self.identity, self.member = who, answering_member(answer, self.address)
        if not refusal and (other := self._leading.twin(self)) is not None:
            refusal = (
                f"node {who.node_id} with directory id {who.directory_id} is already served at {other.address}: if "
                "that is another process, one of them is a copy: stop it, and copy with `chronik backup`"
            )
        if not refusal and self._leading.is_removed(who) and not self.invited:
            refusal = (
                f"node {who.node_id} was removed from the cluster: `chronik members add {self.address}` on the leader "
                "lets it in again"
            )
        if refusal:
            self._becomes("refused", refusal)
            raise ProtocolError(refusal)
        if answer.status == Answer.NOT_NOW:
            raise ProtocolError(answer.reason)

    async def _meet(self, connection: Connection, answer: HandshakeAnswer) -> None:
        log, theirs = self._log, described(answer)
        meeting = epochs.meet(self._local.summary(), theirs)
        checksum = await log.checksum_at(meeting.position)
        if checksum is None:
            raise CorruptLog(f"the histories part at {meeting.position}, where no frame of this log ends")
        if meeting.position < theirs.end or meeting.anew:
            self.truncations += 1
            how = "begins anew at" if meeting.anew and theirs.end else "is truncated to"
            if theirs.end:
                self._local.say(
                    "warning" if meeting.loss_accepted else "info",
                    f"follower {answer.node_id} {how} {meeting.position}"
                    + (": loss accepted by the operator" if meeting.loss_accepted else ""),
                    its_end=theirs.end,
                )
        if meeting.position == self._stuck_at:  # is it our own bytes that it cannot take?
            try:
                await check_frames(log, meeting.position, _within(meeting.position, log.durable.value), checksum)
            except CorruptLog as error:
                self._becomes("refused", str(error))
                raise
        self._stuck_at = meeting.position
        self._position = meeting.position
        self.durable_end = Position(min(answer.durable_end, meeting.position))
        self._queue.clear()
        self._asked_again.clear()
        self._watermark_told = (-1, 0)
        await connection.say(
            Truncate(self._leading.epoch, meeting.position, checksum, meeting.anew, meeting.loss_accepted)
        )

    async def _ship(self, connection: Connection) -> None:
        settings = self._local.settings
        ring = self.ring = Ring(
            settings.replication_max_queue_size, settings.replication_max_queue_bytes, self._log.end
        )

        def on_append(position: Position, frame: Buffer, records: int) -> None:
            ring.push(position, frame, records)
            if self._parked is not None and not (records and self._send_at_once(connection, ring)):
                self._parked.set()
                self._parked = None

        self._log.listeners.append(on_append)
        try:
            self._leading.meets(self)
            self._becomes("catch-up")
            async with Together() as tasks:
                tasks.start(connection.watch)
                tasks.start(self._read, connection)
                tasks.start(self._send, connection, ring, Files(self._log, tasks.start))
                tasks.start(self._beat)
        finally:
            self._log.listeners.remove(on_append)
            self.ring_drops += ring.laps

    # Sending

    async def _send(self, connection: Connection, ring: Ring, files: Files) -> None:
        unbroken_bytes = 0  # sent since others had a turn
        while True:
            frames, size = await self._next_data(ring, files)
            assert self.identity is not None
            if not epochs.may_ship(self._log.state.membership, self.identity, asked_for=self.listed):
                raise ProtocolError(f"node {self.node_id} was removed from the cluster")
            out = self._due(with_frames=size > 0)
            if out or size:
                await connection.send(*out, *frames)
                self.sent_bytes += size
                unbroken_bytes += size
                if unbroken_bytes < TURN_BYTES:
                    continue
                await trio.lowlevel.checkpoint()
            elif self._asked_again:
                await self._send_again(connection, self._asked_again.popleft())
            elif ring.attached or self._position >= self._log.durable.value:
                parked = self._parked = trio.Event()
                await parked.wait()
            unbroken_bytes = 0

    def _send_at_once(self, connection: Connection, ring: Ring) -> bool:
        """A record while nothing else is on its way to this follower: it does not wait for the sender's turn. (With
        something under way it does, and what comes after it goes with it.) A change of members never goes this way:
        it may be this follower's removal."""
        if not ring.attached or self._position != self.durable_end or connection.stuck or self._scope.cancel_called:
            return False
        taken = ring.take(PIECE_BYTES)
        assert isinstance(taken, Run)
        assert taken.position == self._position
        self._position = taken.end
        self.sent_bytes += taken.end - taken.position
        if not connection.send_now(*self._due(with_frames=True), *taken.frames):
            self._queue.append(b"")  # the sender waits until the rest has left
            return False
        return True

    async def _beat(self) -> None:
        while True:
            self._queue.append(encode(self._heartbeat()))
            self.wake()
            await trio.sleep(self._local.settings.replication_heartbeat_interval_secs)

    def tell_watermark(self) -> bool:
        """It moved a while ago. Where no frames take it along it goes alone; False: there are some, ask again later."""
        if self._log.committed.value == self._watermark_told[0]:
            return True
        if self._position != self._quiet_at:
            self._quiet_at = self._position
            return False
        self._watermark_due = True
        self.wake()
        return True

    def _due(self, *, with_frames: bool) -> list[Buffer]:
        """Control messages that go before the next frames. The high watermark waits a moment for frames to go with."""
        out: list[Buffer] = list(self._queue)
        self._queue.clear()
        watermark = (self._log.committed.value, self._leading.drained)
        if watermark != self._watermark_told and (with_frames or out or self._watermark_due or watermark[1]):
            self._watermark_told = watermark
            self._watermark_due = False
            out.append(encode(Committed(*watermark)))
        return out

    def _heartbeat(self) -> Heartbeat:
        log = self._log
        return Heartbeat(self._local.now_ms(), log.committed.value, log.end, self._leading.drained, log.start)

    async def _next_data(self, ring: Ring, files: Files) -> tuple[Sequence[Buffer], int]:
        """The frames that come next, whole ones, and their size; none when there is nothing now."""
        if ring.attached:
            taken = ring.take(PIECE_BYTES)
            if taken is None:
                return [], 0
            if not isinstance(taken, Lapped):
                assert taken.position == self._position
                self._position = taken.end
                return taken.frames, taken.end - taken.position
            self._becomes("catch-up", "the ring overflowed")
        if self._join(ring):
            return await self._next_data(ring, files)
        piece = await files.next(self._position)
        self._position = Position(self._position + len(piece))
        return [piece] if piece else [], len(piece)

    def _join(self, ring: Ring) -> bool:
        """Is the position in the ring's window, or at the very end?"""
        if not ring.join(self._position):
            return False
        self._joined_at = self._position
        self._becomes("streaming")
        return True

    async def _send_again(self, connection: Connection, start: Position) -> None:
        """A segment that has rotted there."""
        log = self._log
        try:
            first, end, chain = await log.segment_bounds(start)
            if first != start or end > log.durable.value:
                raise OutOfRange(f"no sealed segment starts at {start}")
            await check_frames(log, first, end, chain)
            await connection.say(SegmentAgain(start, end, chain))
            at = start
            while at < end:
                data = await log.read(at, min(PIECE_BYTES, end - at))
                await connection.send(data)
                at = Position(at + len(data))
            self._local.say("info", f"sent the segment at {start} again to node {self.node_id}, where it was damaged")
        except (OutOfRange, CorruptLog) as error:
            self._local.say("error", f"node {self.node_id} needs the segment at {start} again: {error}")
            await connection.say(SegmentAgain(start, bad=str(error)[:2000]))

    # Reading

    async def _read(self, connection: Connection) -> None:
        while True:
            event = await connection.receive()
            if isinstance(event, Ack):
                await self._acked(Position(event.position), Checksum(event.checksum), event.drain)
                if event.ids_asked:
                    self._leading.give_ids(event.ids_asked)
                if event.topic_asked:
                    self._leading.make_topic(event.topic_asked)
            elif isinstance(event, HeartbeatAnswer):
                if event.diverged:
                    self._diverges(event.diverged)
                await self._acked(Position(event.position), Checksum(event.checksum), False)
            elif isinstance(event, SegmentAgain):
                self._asked_again.append(Position(event.start))
                self.wake()
            elif isinstance(event, Handshake) and event.purpose != Purpose.SHIP:
                self._given_away = connection
                self._leading.hand_over(connection, event)
                raise HandedOver("the follower is to lead")
            else:
                raise ProtocolError(f"a {type(event).__name__} has no business here")

    async def _acked(self, position: Position, checksum: Checksum, drain: bool) -> None:
        """Count an ack, after the chain value in it was found to be ours."""
        log = self._log
        if position > self._position:
            raise ProtocolError(f"an ack for position {position}, and only {self._position} was sent")
        if position >= log.start:  # below it there is nothing left to compare with
            ours = await log.checksum_at(position)
            difference = epochs.parity(position, checksum, ours)
            if difference:
                self._diverges(difference)
            self.parity_position = position
        self.acks += 1
        if position > self.durable_end or position >= log.durable.value:  # further, or all that there is
            self._progressed, self._stuck_at = True, Position(-1)
        self.durable_end = position
        if not self.caught_up and self.state == "streaming" and position >= self._joined_at:
            self.caught_up = True
            self._local.say("info", f"follower {self.node_id} at {self.address} is caught up", position=position)
            self._leading.changed(self)
        self._leading.acked(self, position, drain)

    def _diverges(self, reason: str) -> None:
        self.parity_mismatches += 1
        if self.state != "diverged":
            self._local.say(
                "error",
                f"follower {self.node_id} at {self.address} differs from this log: {reason}. It no longer counts; "
                "docs/operations.md says under ChronikParity what to do",
            )
        self._leading.diverges(self, reason)
        self._becomes("diverged", reason)
        raise ProtocolError(f"parity: {reason}")


class Telling:
    """Frames take the high watermark along to the followers; where none follow it goes alone, a moment later."""

    def __init__(self, links: Mapping[str, Link]) -> None:
        self._links = links
        self._moved = trio.Event()

    def moved(self) -> None:
        self._moved.set()

    async def run(self) -> None:
        delay_s = WATERMARK_DELAY_S
        while True:
            await self._moved.wait()
            await trio.sleep(delay_s)
            self._moved, delay_s = trio.Event(), WATERMARK_DELAY_S
            told = [link.tell_watermark() for link in self._links.values()]  # each of them, also behind a False
            if not all(told):
                self._moved.set()
                delay_s = WATERMARK_UNDER_LOAD_S


def _within(start: Position, end: Position) -> Position:
    """As much as a follower may have taken without acking any of it."""
    return Position(min(end, start + CHECKED_BYTES))
