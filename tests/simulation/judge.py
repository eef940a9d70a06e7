"""The judge: hears and sees everything, believes no node, and says what promise was broken.

It looks at the disks themselves, at what a power cut would leave of them, not at what nodes say of them; it hears
every control message as it is sent; it is asked after every step of every task. Its own decisions are taken
from the production code at import, before any bug is planted.

What it keeps is one *canon*: the bytes that a leader ever committed, from position 0 on. Every node's log below its
high watermark must be that, byte for byte, for ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import trio

from chronik_repl import identity
from chronik_repl.replication import epochs
from chronik_repl.replication.messages import (
    Ack,
    Answer,
    Handshake,
    HandshakeAnswer,
    HeartbeatAnswer,
    Message,
    Purpose,
)
from chronik_repl.wal import frame
from chronik_repl.wal.changes import HistoryEntry, MembersChanged
from chronik_repl.wal.segment import FRAMES_AT, best_mark
from tests.simulation.clock import HANDSHAKE_S
from tests.simulation.medium import Inode, Medium

if TYPE_CHECKING:
    from tests.simulation.cluster import Machine

ON_ITS_WAY_S = 0.002  # what is said may not be heard yet

_electorate = epochs.electorate  # as they are, whatever is planted later
_in_force = epochs.membership_in_force
may_grant = epochs.may_grant


def in_force(
    changes: Sequence[tuple[int, MembersChanged]], high_watermark: int, history: Sequence[HistoryEntry]
) -> tuple[epochs.Electorate, ...]:
    planted, epochs.electorate = epochs.electorate, _electorate
    try:
        return _in_force(changes, high_watermark, history)
    finally:
        epochs.electorate = planted


class Acked(NamedTuple):
    ident: int
    producer: int
    node: str
    epoch: int
    position: int  # of its last byte at least: a retried one is told only where it ends
    end: int
    everyone: bool  # acks=all


class Stretch(NamedTuple):
    """A part of the stream, as it stands in one file."""

    inode: Inode
    linked: bool  # does the directory name it durably?
    at: int
    size: int


class Judge:
    def __init__(self) -> None:
        self.canon = bytearray()
        self.acked: list[Acked] = []
        self.leaders: dict[int, str] = {}  # epoch → the directory that committed in it
        self.began: dict[int, str] = {}  # epoch → the node that leads it
        self.lossy: set[int] = set()  # epochs that began with a loss that the operator accepted
        self.ids: dict[int, str] = {}  # producer id → the node that gave it out
        self.beginnings: dict[str, trio.Event] = {}  # for those who wait until a node leads
        self.verdicts: list[str] = []
        self.transcript: list[tuple[float, str, tuple[object, ...]]] = []
        self._hash = hashlib.blake2b(digest_size=16)
        self._promised: dict[str, epochs.Promise] = {}  # directory → what it told that it promised
        self._asked: dict[tuple[str, int], Handshake] = {}  # (asker, connection) → its last handshake
        self._durable_seen: dict[tuple[str, int], int] = {}  # (machine, boot) → its acks were checked up to here
        self.machines: dict[str, Machine] = {}
        self.watched: tuple[Machine, ...] = ()
        self._acked_in: dict[epochs.Identity, tuple[int, int]] = {}  # who → its last ack: epoch, position
        self._heard: dict[str, float] = {}  # asker → when it was last told of a leader
        self.commits = self.messages = 0

    # ── what happens ──

    def note(self, what: str, *detail: object) -> None:
        now = trio.current_time()
        self.transcript.append((now, what, detail))
        self._hash.update(f"{now:.9f} {what} {detail!r}\n".encode())

    def trace_hash(self) -> str:
        return self._hash.hexdigest()

    def broken(self, what: str) -> None:
        self.note("BROKEN", what)
        self.verdicts.append(what)

    # ── what nodes say ──

    def said(self, source: str, target: str, connection: int, message: Message) -> None:
        self.messages += 1
        self.note("says", source, target, connection, message)
        machine = self.machines[source]
        if isinstance(message, Handshake):
            self._asked[source, connection] = message
            if message.purpose != Purpose.ASK:
                self._check_taken(machine, message)
        elif isinstance(message, HandshakeAnswer):
            asked = self._asked.get((target, connection))
            if asked is not None and message.status == Answer.OK and asked.purpose != Purpose.ASK:
                self._check_granted(machine, message, asked)
            tells = asked is not None and asked.purpose == Purpose.ASK and message.live_leader not in (0, asked.node_id)
            if tells and machine.cluster.fabric.is_clear(source, target):  # else the answer may come too late
                self._heard[target] = trio.current_time()
        elif isinstance(message, Ack):
            self._check_durable(machine, message.position, "acks")
            session = self._asked.get((target, connection))
            if session is not None:
                who = epochs.Identity(machine.node_id, machine.directory)
                self._acked_in[who] = (session.epoch, message.position)
            promised = self._promised.get(machine.directory, epochs.NO_PROMISE)
            if session is not None and session.epoch < promised.epoch:
                self.broken(f"promise 4: {source} acks in epoch {session.epoch} after it promised {promised.epoch}")
        elif isinstance(message, HeartbeatAnswer) and not message.diverged:
            self._check_durable(machine, message.position, "answers a heartbeat with")

    def _check_taken(self, machine: Machine, message: Handshake) -> None:
        kept = self._kept_promise(machine)
        wanted = epochs.Promise(message.epoch, message.node_id, message.directory_id)
        if kept != wanted:
            self.broken(f"promise 4: {machine.name} asks for epoch {message.epoch} with {kept} on its own disk")
        # It asked, and now it takes: what it was told before it asked, or in an earlier life, does not bind it.
        asked_at, _ = machine.cluster.fabric.dialled.get(machine.name, (0.0, 0.0))
        heard_at = self._heard.get(machine.name, -1.0)
        told = max(asked_at, machine.booted_at) <= heard_at < asked_at + HANDSHAKE_S - ON_ITS_WAY_S
        if message.purpose == Purpose.TAKE and told and not machine.promoted:
            self.broken(f"{machine.name} was told who leads, and takes epoch {message.epoch} all the same")
        if message.purpose == Purpose.SHIP:
            start = next((e.start for e in message.history if e.epoch == message.epoch), None)
            gone = start is not None and start < machine.log_start
            if start is None or not (gone or self._holds_durably(machine, start, start + 1)):
                self.broken(f"{machine.name} ships epoch {message.epoch} before its start frame is durable")

    def _check_granted(self, machine: Machine, message: HandshakeAnswer, asked: Handshake) -> None:
        granted = epochs.Promise(asked.epoch, asked.node_id, asked.directory_id)
        before = self._promised.get(message.directory_id, epochs.NO_PROMISE)
        if not may_grant(before, granted):
            self.broken(f"promise 4: {machine.name} promised {before} and now {granted}")
        self._promised[message.directory_id] = max(before, granted)
        kept = self._kept_promise(machine)
        if kept.epoch < granted.epoch:
            self.broken(f"promise 4: {machine.name} grants {granted} with {kept} on its disk")

    def _kept_promise(self, machine: Machine) -> epochs.Promise:
        """As a power cut would leave it."""
        medium = machine.disk.medium
        inode = medium.folders[""].durable.get(identity.FILE)
        if inode is None:
            return epochs.NO_PROMISE
        content = identity.decode(bytes(medium.inodes[inode].durable))
        return epochs.Promise(content.promised_epoch, content.promised_to, content.promised_directory)

    def _check_durable(self, machine: Machine, position: int, what: str) -> None:
        key = (machine.name, machine.boots)
        seen = self._durable_seen.get(key, 0)
        start = min(seen, position) if seen else max(0, position - 2000)
        if position > start and not self._holds_durably(machine, max(start, machine.log_start), position):
            self.broken(f"promise 1: {machine.name} {what} position {position}, which a power cut would take away")
        self._durable_seen[key] = position

    # ── what stands on disks ──

    def stretches(self, medium: Medium, start: int, end: int) -> list[Stretch] | None:
        """Where [start, end) of the stream stands; None where a part of it is nowhere."""
        if end <= start:
            return []
        folder = medium.folders.get("wal")
        if folder is None:
            return None
        found, at = list[Stretch](), start
        segments = sorted((int(name[:20]), inode, name) for name, inode in folder.seen.items() if name[20:] == ".wal")
        for number, (first, inode, name) in enumerate(segments):
            until = segments[number + 1][0] if number + 1 < len(segments) else end
            if until <= at:
                continue
            if first > at:
                return None
            size = min(end, until) - at
            found.append(Stretch(medium.inodes[inode], folder.durable.get(name) == inode, FRAMES_AT + at - first, size))
            at += size
            if at == end:
                return found
        return None

    def read(self, medium: Medium, start: int, end: int, *, durable: bool = False) -> bytes | None:
        found = self.stretches(medium, start, end)
        if found is None:
            return None
        pieces = []
        for stretch in found:
            if durable and not stretch.linked:
                return None
            data = stretch.inode.durable if durable else stretch.inode.seen
            piece = bytes(data[stretch.at : stretch.at + stretch.size])
            if len(piece) != stretch.size:
                return None
            pieces.append(piece)
        return b"".join(pieces)

    def _holds_durably(self, machine: Machine, start: int, end: int) -> bool:
        found = self.stretches(machine.disk.medium, start, end)
        if found is None:
            return False
        for stretch in found:
            upto = stretch.at + stretch.size
            if not stretch.linked or stretch.inode.durable[stretch.at : upto] != stretch.inode.seen[stretch.at : upto]:
                return False
        return True

    # ── after every step ──

    def look(self) -> None:
        for machine in self.watched:
            node = machine.node
            if node is None:
                continue
            if machine.watermark.value != machine.committed:
                self._moved(machine, machine.watermark.value)
            if node._leadership is not machine.leadership:
                machine.leadership = node._leadership
                if machine.leadership is not None:
                    self.note("begins", machine.name, machine.leadership.epoch)
                    self.began[machine.leadership.epoch] = machine.name
                    if (waiting := self.beginnings.pop(machine.name, None)) is not None:
                        waiting.set()

    def _moved(self, machine: Machine, now: int) -> None:
        node, before = machine.node, machine.committed
        assert node is not None
        self.commits += 1
        self.note("high watermark", machine.name, before, now)
        machine.committed = now
        history = node.log.state.history
        for other in self.watched:  # the leader's own high watermark may move after its followers are cut
            for entry in other.node.log.state.history if other.node is not None else ():
                if entry.accept_loss and entry.epoch not in self.lossy:
                    self._lose(next(m for m in self.watched if m.node_id == entry.leader), entry)
        if machine.excused_to is not None and not any(entry.epoch in self.lossy for entry in history):
            return  # it has not heard of the loss yet
        if now < before:
            if machine.excused_to is None or now < machine.excused_to:
                self.broken(f"promise 2: the high watermark of {machine.name} goes back from {before} to {now}")
                return
            self._check_kept(machine, now, before)
            machine.checked = min(machine.checked, now)
        leads = node.role == "leader" or machine.leads
        if leads:
            self._leader_moved(machine, now)
        machine.checked = max(machine.checked, machine.log_start)
        data = self.read(machine.disk.medium, machine.checked, now)
        if data is None:
            self.broken(f"promise 2: {machine.name} shows {now} and does not hold all below it")
            return
        start = machine.checked
        known = self.canon[start:now]
        if data[: len(known)] != known and not machine.rotten:
            at = start + next(i for i, byte in enumerate(known) if byte != data[i])
            self.broken(f"promise 2: {machine.name} shows other bytes at {at} than were committed there")
        if now > len(self.canon):
            if leads:
                self._check_copies(machine, before, now)
                self.canon += data[len(known) :]
            else:
                self.broken(f"promise 2: {machine.name} shows {now}, which no leader has committed")
        machine.checked = now

    def _leader_moved(self, machine: Machine, now: int) -> None:
        node = machine.node
        assert node is not None
        epoch, directory = node.epoch, machine.directory
        state = node.log.state
        if state.history and state.history[-1].epoch == epoch and now <= state.history[-1].start:
            self.broken(f"{machine.name} commits {now} by counting, below the start of its epoch {epoch}")
        if len(state.membership) > 1 and state.membership[-2][0] > now:
            self.broken(
                f"{machine.name} changes members at {state.membership[-1][0]} before the last change is committed"
            )
        if self.leaders.setdefault(epoch, directory) != directory:
            self.broken(f"promise 4: two leaders commit in epoch {epoch}")
        end = len(self.canon)
        later = [e for e in self.leaders if e > epoch]
        if now > end and later:
            self.broken(
                f"promise 4: {machine.name} commits to {now} in epoch {epoch}, after epoch {max(later)} began to"
            )

    def _check_copies(self, machine: Machine, before: int, now: int) -> None:
        """What is committed is durable on the leader and on k other members, for each set in force."""
        node = machine.node
        assert node is not None
        state = node.log.state
        start = max(before, machine.log_start)
        data = self.read(machine.disk.medium, start, now, durable=True)
        if data is None or data != self.read(machine.disk.medium, start, now):
            self.broken(f"promise 1: {machine.name} commits {now}, which is not durable on itself")
        last_change = state.membership[-1][0] if state.membership else 0
        for known, end in ((before, last_change if before < last_change < now else now), (now, now)):
            data = self.read(machine.disk.medium, start, end, durable=True)
            holders = self._holders(machine, node.epoch, start, end, data)
            for members in in_force(state.membership, known, state.history):
                have = len(holders & members.who)
                if have < members.sync_replicas:
                    self.broken(
                        f"promise 1: {machine.name} commits {end} with {have} of {members.sync_replicas} durable copies"
                    )
                    return

    def _holders(self, machine: Machine, epoch: int, start: int, end: int, data: bytes | None) -> set[epochs.Identity]:
        """Who else has a durable copy. One that was acked and then lost with its disk was one: it is among the k that
        may be lost."""
        there = {other.directory for other in self.machines.values()}
        lost = {
            who
            for who, (acked_epoch, position) in self._acked_in.items()
            if who.directory_id not in there and acked_epoch == epoch and position >= end
        }
        return lost | {
            epochs.Identity(other.node_id, other.directory)
            for other in self.machines.values()
            if other is not machine and self._has_copy(other, start, end, data)
        }

    def _has_copy(self, machine: Machine, start: int, end: int, data: bytes | None) -> bool:
        if machine.rotten:  # it was whole when it said so
            return self._holds_durably(machine, start, end)
        return self.read(machine.disk.medium, start, end, durable=True) == data

    def ack(self, machine: Machine, acked: Acked) -> None:
        """A producer was told."""
        self.note("ack", acked)
        if not self._holds_durably(machine, acked.position, acked.end):
            self.broken(f"promise 1: {machine.name} acks {acked.position}, which a power cut would take away")
        if acked.everyone and len(self.canon) < acked.end:
            self.broken(f"promise 1: {machine.name} acks {acked.position} to acks=all, and it is not committed")
        asked = machine.sync_replicas_asked
        if acked.everyone and not any(epoch > acked.epoch for epoch in self.lossy):
            data = self.read(machine.disk.medium, acked.position, acked.end)
            have = len(self._holders(machine, acked.epoch, acked.position, acked.end, data))
            if have < asked:
                self.broken(
                    f"promise 1: {machine.name} acks {acked.position} to acks=all with {have} of the {asked} durable "
                    "copies that its operator asked for"
                )
        self.acked.append(acked)

    def told_id(self, producer_id: int, node: str) -> None:
        """A producer was given its id."""
        self.note("producer id", producer_id, node)
        if producer_id in self.ids:
            self.broken(f"producer id {producer_id} was given out by {self.ids[producer_id]} and again by {node}")
        self.ids[producer_id] = node

    # ── losses that the operator accepts ──

    def _lose(self, machine: Machine, entry: HistoryEntry) -> None:
        """The new leader's log is the history from here on. What was committed beyond it, or otherwise, is given up on
        every node, and kept in lost/."""
        start = machine.log_start
        data = self.read(machine.disk.medium, start, entry.start) or b""
        known = self.canon[start : entry.start]
        same = start + next((i for i, (a, b) in enumerate(zip(data, known, strict=False)) if a != b), len(known))
        self.note("loss accepted", machine.name, entry.epoch, entry.start, same)
        self.lossy.add(entry.epoch)
        if not machine.accepts_loss:
            self.broken(f"epoch {entry.epoch} of {machine.name} begins with a loss that nobody accepted")
        self.canon[start:] = data
        self.acked = [acked for acked in self.acked if acked.end <= same]
        for other in self.machines.values():
            other.checked = min(other.checked, same)
            if other is not machine:
                other.excused_to = same

    def _check_kept(self, machine: Machine, start: int, end: int) -> None:
        """What is cut below a high watermark stands in lost/, for the operator to look at."""
        folder = machine.disk.medium.folders.get("lost")
        kept = sorted(folder.durable) if folder is not None else []
        at = start
        for name in kept:
            first, last = int(name[:20]), int(name[21:41])
            if first <= at < last:
                at = last
        if at < end:
            self.broken(f"{machine.name} was cut from {end} to {start}, and lost/ has only {kept}")

    # ── from one life to the next ──

    def kept_watermark(self, medium: Medium) -> int:
        """The high watermark that a power cut now would leave."""
        folder = medium.folders.get("wal")
        names = sorted((n for n in folder.durable if n.endswith(".wal")), reverse=True) if folder is not None else []
        for name in names[:1]:
            mark = best_mark(bytes(medium.inodes[folder.durable[name]].durable[:FRAMES_AT])) if folder else None
            return mark.high_watermark if mark is not None else 0
        return 0

    def restarts(self, machine: Machine) -> None:
        """A node begins with the high watermark that stands on its disk, or a higher one."""
        if machine.committed < machine.kept and not machine.rotten and machine.excused_to is None:
            self.broken(
                f"promise 2: the high watermark of {machine.name} goes back over a restart, from {machine.kept} to "
                f"{machine.committed}"
            )

    # ── at the end ──

    def frames(self) -> list[frame.Frame]:
        """The canon, parsed."""
        view, at, chain = memoryview(bytes(self.canon)), 0, 0
        found = []
        while at < len(view):
            got = frame.decode(view, at, at, chain)
            if got is None:
                self.broken("the committed log ends inside a frame")
                break
            found.append(got)
            at += got.size
            chain = got.checksum
        return found
