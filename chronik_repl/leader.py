"""The role of a leader: one epoch, from its start frame to the promise that ends it.

It *begins* with the epoch-start frame; that and everything below it is durable here before anything is shipped, cut or
accepted. Then it ships to everyone listed and every member (a `Link` each), counts acks (progress.py) and moves the
high watermark, writes membership changes that the variables or the operator ask for, one at a time, and decides on
retention.

It ends when a peer shows a later promise, or this epoch's to another node (`Deposed`), or when this node itself
promises a later epoch: then nothing more is accepted and whoever waits is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import trio

from chronik_repl.addresses import split_address
from chronik_repl.errors import ChronikError, DiskFull, NotLeader, Refused
from chronik_repl.positions import Epoch, NodeId, Position
from chronik_repl.replication import epochs, progress
from chronik_repl.replication.local import Local
from chronik_repl.replication.messages import Handshake
from chronik_repl.replication.session import Connection
from chronik_repl.replication.shipper import Link, Telling
from chronik_repl.replication.trail import Trail
from chronik_repl.standing import FollowerStatus, Peer, acks_all_means, peer_of
from chronik_repl.wal.changes import EpochStart, LogStartMoved, MembersChanged, ProducerIdGiven, TopicMade
from chronik_repl.wal.frame import TOPIC_PATTERN
from chronik_repl.wal.state import ALL_PARTITIONS_MAX
from chronik_repl.words import count_of

RETENTION_INTERVAL_S = 10.0
IDS_AT_ONCE = 16  # producer ids for a follower that asks
ANSWER_TIMEOUT_S = 30.0  # an address that is to be added and never answers
DRAIN_TIMEOUT_S = 15.0  # a promotion that does not come after this: the leader accepts again

HandOver = Callable[[Connection, Handshake], None]


class Deposed(ChronikError):
    """This leadership is over. `again`: nobody won; ask and take again."""

    def __init__(self, promise: epochs.Promise, *, again: bool) -> None:
        super().__init__(f"epoch {promise.epoch} is promised to node {promise.node_id}")
        self.promise, self.again = promise, again


class Leadership:
    def __init__(self, local: Local, epoch: Epoch, hand_over: HandOver) -> None:
        self.epoch = epoch
        self._local = local
        self._log = local.log
        self._hand_over = hand_over
        self._links: dict[str, Link] = {}
        self._progress: progress.Progress | None = None
        self._trail = Trail()
        self._removed: set[epochs.Identity] = set()  # by command: not added again by merely answering
        self._members_wake = trio.Event()
        self._telling = Telling(self._links)
        self._sets: tuple[epochs.Electorate, ...] = ()
        self._sets_key: tuple[int, bool] = (-1, False)
        self._deposed = trio.Event()
        self._deposed_by = epochs.NO_PROMISE
        self._draining_until = 0.0
        self._drainer: Link | None = None
        self._drained = Position(0)
        self._nursery: trio.Nursery | None = None
        self.begun = False

    # What others see

    @property
    def accepting(self) -> bool:
        return self.begun and not self.draining and not self._deposed.is_set()

    @property
    def deposed(self) -> bool:
        return self._deposed.is_set()

    @property
    def draining(self) -> bool:
        return self._draining_until > 0

    @property
    def drained(self) -> Position:
        """Where the log ends, once it has stopped growing for a promotion and is committed; else 0."""
        return self._drained

    @property
    def links(self) -> Mapping[str, Link]:
        return self._links

    @property
    def sync_replicas(self) -> int:
        """The k that is asked for."""
        changes = self._log.state.membership
        return self._local.sync_replicas_asked(changes[-1][1].sync_replicas if changes else 0)

    @property
    def sync_in_force(self) -> bool:
        return progress.in_force(self.sync_replicas, self._in_force())

    @property
    def enough_replicas(self) -> bool:
        """Is the k that is asked for in force, and are as many members in session?"""
        return self.sync_in_force and progress.enough_live(self._local.me, self._in_force(), self._live())

    def _live(self) -> set[epochs.Identity]:
        aside = self._progress.set_aside if self._progress else set()
        return {link.identity for link in self._links.values() if link.live and link.identity} - aside

    def peers(self) -> tuple[Peer, ...]:
        """The members by this log's last word."""
        live = self._live()
        changes = self._log.state.membership
        return tuple(
            peer_of(member, live=epochs.identity(member) in live or epochs.identity(member) == self._local.me)
            for member in (changes[-1][1].members if changes else ())
        )

    def followers(self) -> tuple[FollowerStatus, ...]:
        now, log = trio.current_time(), self._log
        members = {epochs.identity(m): m for m in (log.state.membership[-1][1].members if log.state.membership else ())}
        silent = {m.replication_address: m for m in members.values()}  # who it is that does not answer there
        found = []
        for link in self._links.values():
            records, seconds = self._trail.lag(link.durable_end, log.durable.value, log.stats.appended_records, now)
            known = silent.get(link.address)
            found.append(
                FollowerStatus(
                    node_id=link.node_id if link.identity or not known else known.node_id,
                    address=link.address,
                    state=link.state,
                    detail=link.detail,
                    member=link.identity in members if link.identity else known is not None,
                    durable_end=link.durable_end,
                    lag_positions=max(0, log.durable.value - link.durable_end),
                    lag_records=records,
                    lag_seconds=seconds,
                    ring_frames=link.ring.frames if link.ring else 0,
                    ring_bytes=link.ring.held_bytes if link.ring else 0,
                    ring_drops=link.ring_drops + (link.ring.laps if link.ring else 0),
                    sent_bytes=link.sent_bytes,
                    acks=link.acks,
                    reconnects=link.reconnects,
                    truncations=link.truncations,
                    parity_mismatches=link.parity_mismatches,
                    parity_position=link.parity_position,
                )
            )
        return tuple(found)

    # Its life

    async def run(
        self,
        *,
        accept_loss: bool = False,
        members: MembersChanged | None = None,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Lead until deposed; raises Deposed. `members`: what an accepted loss, or founding, makes of them."""
        log, me = self._log, self._local.me
        self._still()  # `begin_epoch` accepts again, whatever was refused before
        start = log.begin_epoch(self.epoch, EpochStart(me.node_id, me.directory_id, accept_loss))
        end = start.end
        if members is not None:
            end = log.append_change(members).end
        await log.durable.wait(end)
        await self._local.passport.begin_log()
        self._progress = progress.Progress(me, self.epoch, start.end, log.committed.value)
        self.begun = True
        self._trail.mark(log.durable.value, log.stats.appended_records, trio.current_time())
        self._advance()
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._keep_links()
            nursery.start_soon(self._telling.run)
            nursery.start_soon(self._change_members)
            nursery.start_soon(self._retain)
            log.durable.watchers.append(self)
            try:
                self.passed(log.durable.value)
                task_status.started()
                await self._deposed.wait()
            finally:
                log.durable.watchers.remove(self)
            nursery.cancel_scope.cancel()
        self._still()

    def _still(self) -> None:
        """Raises Deposed if it is over: also before it began."""
        if self._deposed.is_set():
            raise Deposed(self._deposed_by, again=self._deposed_by.epoch == self.epoch)

    def depose(self, promise: epochs.Promise) -> None:
        """From this step on nothing is accepted, and no ack counts. Whoever waits is told."""
        if self._deposed.is_set():
            return
        self._deposed_by = promise
        self._deposed.set()
        for link in self._links.values():
            link.stop()
        self._log.stop_accepting(
            NotLeader(
                f"node {self._local.me.node_id} no longer leads: epoch {promise.epoch} is promised to node "
                f"{promise.node_id}",
                NodeId(promise.node_id),
            )
        )

    def meets_promise(self, promise: epochs.Promise) -> None:
        self._local.say("warning", f"deposed: epoch {promise.epoch} is promised to node {promise.node_id}")
        self.depose(promise)

    def hand_over(self, connection: Connection, asked: Handshake) -> None:
        self._hand_over(connection, asked)

    # Counting

    def _in_force(self) -> tuple[epochs.Electorate, ...]:
        changes = self._log.state.membership
        end = changes[-1][0] if changes else 0
        key = (end, end <= self._log.committed.value)
        if key != self._sets_key:
            self._sets, self._sets_key = self._local.sets(), key
        return self._sets

    def _advance(self) -> None:
        """Move the high watermark as far as it may go."""
        counted, log = self._progress, self._log
        if counted is None or self._deposed.is_set():
            return
        before = log.committed.value
        while True:
            known = counted.committed
            if counted.advance(log.durable.value, self._in_force()) == known:
                break
            log.commit_to(counted.committed)  # which may make a new membership the only one in force
        if log.committed.value != before:
            self._telling.moved()
            changes = log.state.membership
            if before < max(counted.start_end, changes[-1][0] if changes else 0):
                self._members_wake.set()  # the next change may have waited for this
        self._end_draining()

    def passed(self, durable_end: Position) -> None:
        """The log's durable end moved: in the same step the high watermark moves as far as it may."""
        self._trail.mark(durable_end, self._log.stats.appended_records, trio.current_time())
        self._advance()
        for link in self._links.values():
            if link.state == "catch-up":
                link.wake()

    def failed(self, error: BaseException) -> None:
        """Whoever runs the log ends this process, or we were deposed."""

    def acked(self, link: Link, position: Position, drain: bool) -> None:
        assert self._progress is not None
        assert link.identity is not None
        if drain and not self.draining and not self._deposed.is_set():
            self._draining_until = trio.current_time() + DRAIN_TIMEOUT_S
            self._drainer = link
            self._local.say("info", f"draining: node {link.node_id} is to lead")
            assert self._nursery is not None
            self._nursery.start_soon(self._stop_draining)
        if self._progress.ack(link.identity, self.epoch, position):
            self._advance()
        else:
            self._end_draining()

    def give_ids(self, asked: str) -> None:
        if not self.accepting or not self.sync_in_force:
            return
        last = self._log.state.next_producer_id + IDS_AT_ONCE - 1
        try:
            self._log.append_change(ProducerIdGiven(last, IDS_AT_ONCE, asked))
        except (DiskFull, NotLeader):
            return  # it asks again

    def make_topic(self, name: str) -> None:
        settings, known = self._local.settings, self._log.state.topics.get(name)
        if (
            not self.accepting
            or not self.enough_replicas
            or not settings.auto_create_topics
            or (known is not None and known.partitions)
            or sum(1 for _ in self._log.state.partitions()) + settings.default_partitions > ALL_PARTITIONS_MAX
        ):
            return
        if TOPIC_PATTERN.match(name) and name not in (".", ".."):
            try:
                self._log.append_change(TopicMade(name, settings.default_partitions))
            except (DiskFull, NotLeader):
                return

    def changed(self, link: Link) -> None:
        self._members_wake.set()

    def twin(self, link: Link) -> Link | None:
        same = (other for other in self._links.values() if other is not link and other.live)
        return next((other for other in same if other.identity == link.identity), None)

    def meets(self, link: Link) -> None:
        assert self._progress is not None
        if link.identity is not None:
            self._progress.readmit(link.identity)

    def diverges(self, link: Link, reason: str) -> None:
        assert self._progress is not None
        if link.identity is not None:
            self._progress.set_apart(link.identity)

    def is_removed(self, who: epochs.Identity) -> bool:
        return who in self._removed

    # Draining for a promotion

    def _end_draining(self) -> None:
        if not self.draining or self._drained or self._drainer is None:
            return
        end = self._log.end
        if self._log.committed.value >= end and self._drainer.durable_end >= end:
            self._drained = end
            self._drainer.wake()

    async def _stop_draining(self) -> None:
        await trio.sleep_until(self._draining_until)
        self._draining_until, self._drained, self._drainer = 0.0, Position(0), None
        self._local.say("warning", "the promotion did not come: accepting again")
        for link in self._links.values():
            link.wake()

    # Members

    def _keep_links(self) -> None:
        """One link for each address that is listed or a member's."""
        assert self._nursery is not None
        wanted = dict.fromkeys(self._local.settings.replication_followers, True)
        changes = self._log.state.membership
        for member in changes[-1][1].members if changes else ():
            if member.replication_address and epochs.identity(member) != self._local.me:
                wanted.setdefault(member.replication_address, False)
        wanted.pop(self._local.replication_address, None)
        for address, listed in wanted.items():
            if address not in self._links:
                link = self._links[address] = Link(self._local, self, address, listed=listed)
                self._nursery.start_soon(link.run)

    async def _change_members(self) -> None:
        """Write what is wanted, one change at a time, each after the one before is committed."""
        log = self._log
        refuses = not self.sync_in_force
        while True:
            self._members_wake = trio.Event()
            changes = log.state.membership
            if refuses and self.sync_in_force:
                refuses = False
                self._local.say("info", f"from now on acks=all means {acks_all_means(self.sync_replicas)}")
            if self.accepting and epochs.may_change_members(changes, log.committed.value, self._start_end):
                wanted = self._wanted(changes[-1][1] if changes else MembersChanged((), 0))
                if not changes or wanted != changes[-1][1]:
                    self._write(wanted)
                    continue
            await self._members_wake.wait()

    @property
    def _start_end(self) -> Position:
        assert self._progress is not None
        return self._progress.start_end

    def _write(self, wanted: MembersChanged) -> None:
        names = ", ".join(str(m.node_id) for m in wanted.members)
        mode = f"sync to {wanted.sync_replicas}" if wanted.sync_replicas else "async"
        self._local.say("info", f"members: {names}; {mode}", epoch=self.epoch)
        self._log.append_change(wanted)
        self._keep_links()

    def _wanted(self, now: MembersChanged) -> MembersChanged:
        """Those that are, with the addresses that they have now, and those listed that have caught up."""
        members = {m.node_id: m for m in now.members}
        members[self._local.me.node_id] = self._local.member
        for link in self._links.values():
            member, who = link.member, link.identity
            if member is None or who is None or not link.live or (who in self._removed and not link.invited):
                continue
            known = members.get(who.node_id)
            is_member = known is not None and epochs.identity(known) == who
            wiped = known is not None and known.replication_address == link.address  # its disk was replaced
            if is_member or (link.caught_up and (link.listed or wiped)):
                members[who.node_id] = member
                self._removed.discard(who)
        chosen = tuple(sorted(members.values()))
        k = self._local.sync_replicas_asked(now.sync_replicas)
        return MembersChanged(chosen, k if k < len(chosen) else min(now.sync_replicas, len(chosen) - 1))

    async def add_member(self, address: str) -> None:
        """Dial there; whoever answers is added once it has caught up."""
        assert self._nursery is not None
        try:
            split_address(address)
        except ValueError as error:
            raise Refused(f"{error}, as in node4:9291") from None
        link = self._links.get(address)
        if link is None or not link.live:
            if link is not None:
                link.stop()  # it may be waiting before it dials again
            link = self._links[address] = Link(self._local, self, address, listed=True)
            self._nursery.start_soon(link.run)
        link.listed = link.invited = True
        self._members_wake.set()
        give_up_at = trio.current_time() + ANSWER_TIMEOUT_S
        while True:
            changes = self._log.state.membership
            if link.identity in {epochs.identity(m) for m in changes[-1][1].members}:
                await self._log.committed.wait(changes[-1][0])
                return
            now = trio.current_time()
            with trio.move_on_at(now + ANSWER_TIMEOUT_S if link.live else give_up_at):
                await self._log.committed.wait_beyond(self._log.committed.value)
            if not link.live and trio.current_time() >= give_up_at:
                if self._links.get(address) is link and address not in self._local.settings.replication_followers:
                    link.stop()
                    del self._links[address]
                raise Refused(_not_added(link))

    async def remove_member(self, which: int | str) -> None:
        """By its node id, or by its replication address. Returns once it is committed."""
        log = self._log
        while True:
            changes = log.state.membership
            now = changes[-1][1]
            found = next((m for m in now.members if which and which in (m.node_id, m.replication_address)), None)
            if found is None:
                who = which if isinstance(which, str) else f"node {which}"
                raise Refused(f"{who} is not a member; members are {_names(now)}")
            node_id = found.node_id
            if node_id == self._local.me.node_id:
                raise Refused(f"node {node_id} leads: promote another node first")
            if epochs.may_change_members(changes, log.committed.value, self._start_end):
                break
            await log.committed.wait(max(changes[-1][0], self._start_end))
        rest = tuple(m for m in now.members if m.node_id != node_id)
        if now.sync_replicas >= len(rest):
            raise Refused(
                f"acks=all waits for {count_of(now.sync_replicas, 'follower')}, and without node {node_id} there would "
                f"be {len(rest) - 1}: lower CHRONIK_REPLICATION_SYNC_REPLICAS or add a member first"
            )
        wanted = MembersChanged(rest, now.sync_replicas)
        if not progress.enough_live(self._local.me, (epochs.electorate(wanted),), self._live()):
            raise Refused(
                f"without node {node_id} too few followers would be connected, so the removal could not be committed: "
                "start or add another member first"
            )
        self._removed.add(epochs.identity(found))
        self._write(wanted)
        for link in list(self._links.values()):
            silent = link.identity is None and link.address == found.replication_address
            if silent or link.identity == epochs.identity(found):
                link.stop()
                del self._links[link.address]
        await log.committed.wait(log.end)

    # Retention

    async def _retain(self) -> None:
        log = self._log
        while True:
            await trio.sleep(RETENTION_INTERVAL_S)
            if not self.accepting:
                continue
            now_ms = log.ages.now_ms()
            if warning := log.ages.news():
                self._local.say("warning", warning)
            if log.roll_aged(now_ms):
                self._local.say("info", "a segment ended by its age", at=log.end)
            due = log.retention_due(now_ms, self._held())
            if due is not None:
                self._local.say("info", f"the log starts at {due} now", was=log.start)
                log.append_change(LogStartMoved(due))

    def _held(self) -> list[Position]:
        """What every other member has durable (nothing, as far as we know, if it has not spoken yet), and newcomers."""
        assert self._progress is not None
        acked = self._progress.acked
        members = {epochs.identity(m) for m in self._log.state.membership[-1][1].members} - {self._local.me}
        held = [acked.get(who, Position(0)) for who in members]
        return held + [x.durable_end for x in self._links.values() if x.live and x.identity not in members]


def _not_added(link: Link) -> str:
    why = link.detail or "no connection"
    if link.identity is None:
        return f"nobody answers at {link.address}: {why}. Start the node there, or correct the address"
    return f"node {link.node_id} at {link.address} cannot be added: {why}. Mend that, or give another address"


def _names(change: MembersChanged) -> str:
    return ", ".join(f"node {m.node_id} {m.replication_address}".rstrip() for m in change.members)
