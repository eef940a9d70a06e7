"""One node: the directory, the log, the doors, and the role it plays now.

A role is a state, not a build. Whatever the program is called, a node follows its log: one that led the last epoch
stands for leadership again, an empty one that was started to lead founds a cluster, everyone else follows. `promote`
changes the role in place; a promise given to another node ends a leadership in the same step.

    stand   ask everyone (nothing changes) → could it be won? → take an epoch → enough grants? → lead
    lead    leader.py, until deposed
    follow  receiver.py serves whoever leads; nothing to do here but wait

Everything outside comes in through `run_node`: disk, network, clock, chance. So the simulator runs this very code.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import msgspec
import trio

from chronik_repl import __version__, identity, tables
from chronik_repl.campaign import NO_VOTE, Campaign, Say, Won
from chronik_repl.config import Program, Settings
from chronik_repl.errors import CannotLead, ChronikError, NotLeader, Refused, first_of
from chronik_repl.leader import Deposed, Leadership
from chronik_repl.meters import Meters
from chronik_repl.positions import NodeId
from chronik_repl.replication import epochs
from chronik_repl.replication.local import LiveLeader, Local
from chronik_repl.replication.messages import Handshake
from chronik_repl.replication.network import Network
from chronik_repl.replication.receiver import Receiver
from chronik_repl.replication.session import Connection
from chronik_repl.replication.silence import nobody_leads, tell_silence
from chronik_repl.standing import LogStatus, Peer, Role, Status, acks_all_means, peer_of
from chronik_repl.wal.disk import Disk
from chronik_repl.wal.log import Log, LogSettings
from chronik_repl.words import count_of

STAND_DELAY_S = 0.2
STAND_DELAY_MAX_S = 3.0
STOP_TIMEOUT_S = 5.0
BEGIN_TIMEOUT_S = 30.0
HAND_OVER_TIMEOUT_S = 1.0


class Door(Protocol):
    """A front door: serves until cancelled, and tells its address once it is open."""

    async def __call__(self, house: Node, settings: Settings, *, task_status: trio.TaskStatus[Any]) -> None: ...


async def run_node(
    settings: Settings,
    disk: Disk,
    network: Network,
    *,
    program: Program = "follower",
    doors: Mapping[str, Door] | None = None,
    clock: Callable[[], float] = time.time,
    rng: random.Random | None = None,
    task_status: trio.TaskStatus[Node] = trio.TASK_STATUS_IGNORED,
) -> None:
    """One node, until `Node.stop`. Started with the Node once log and doors are open. Cancelling it is a crash."""
    rng = rng or random.Random()
    disk.lock()
    try:
        content = await identity.load_or_make(disk, rng, NodeId(settings.node_id), settings.cluster_id)
        passport = identity.Passport(disk, content)
        log = await Log.open(
            disk,
            log_settings(settings),
            passport.cluster_id or None,
            clock_ms=lambda: int(clock() * 1000),
            set_aside_damage=program == "follower" and settings.wal_receiver_enabled,  # a leader's can heal it
        )
        if log.lasting:
            await passport.begin_log()
        node = Node(Local(settings, passport, log, network, clock, rng), disk, program)
        await node.run(doors or {}, task_status)
    finally:
        disk.close()


def log_settings(settings: Settings) -> LogSettings:
    return LogSettings(
        segment_bytes=settings.wal_segment_bytes,
        frame_bytes_max=settings.max_frame_bytes,
        min_free_bytes=settings.min_free_bytes,
        linger_s=settings.wal_linger_secs,
        retention_bytes=settings.wal_retention_bytes,
        retention_hours=settings.wal_retention_hours,
        keep_bytes=settings.wal_keep_bytes,
        scrub_mb_per_s=settings.scrub_mb_per_sec,
    )


class Node:
    """Implements standing.House."""

    def __init__(self, local: Local, disk: Disk, program: Program) -> None:
        self._local = local
        self._disk = disk
        self._program = program
        self.meters = Meters()
        self._receiver = Receiver(local, self.promise)
        self._campaign = Campaign(local, self._receiver, self.promise)
        self._leadership: Leadership | None = None
        self._won: Won | None = None
        self._promising = trio.Lock()
        self._standing = trio.Lock()
        self._stand_scope = trio.CancelScope()
        self._wake = trio.Event()
        self._changes = trio.Event()
        self._stopping = False
        self._stopped = trio.Event()
        self._wants_to_lead = False
        self._waits_for = ""  # why it does not lead yet, as last said
        self._nursery: trio.Nursery | None = None
        self._handed_over = 0  # connections on which a new leader still waits for our answer
        self._began = trio.current_time()
        local.live = self._live

    # ── what the doors see ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def log(self) -> Log:
        return self._local.log

    @property
    def node_id(self) -> int:
        return self._local.me.node_id

    @property
    def cluster_id(self) -> str:
        return self._local.passport.cluster_id

    @property
    def role(self) -> Role:
        if self._stopping:
            return "stopping"
        if self._leadership is not None and self._leadership.begun:
            return "leader"
        return "starting" if self._wants_to_lead and self._live() is None else "follower"

    @property
    def epoch(self) -> int:
        if self._leadership is not None:
            return self._leadership.epoch
        heard = self._receiver.last_heard()
        return heard.epoch if heard else self.log.state.history[-1].epoch if self.log.state.history else 0

    @property
    def leader(self) -> Peer | None:
        live = self._live() or self._receiver.last_heard()
        return peer_of(live.member, live=self._live() is not None) if live else None

    @property
    def peers(self) -> tuple[Peer, ...]:
        if self._leadership is not None:
            return self._leadership.peers()
        changes = self.log.state.membership
        live = self._live()
        known = {m.node_id: m for m in (changes[-1][1].members if changes else ())}
        alive = {self.node_id}
        if live is not None:
            known[live.member.node_id] = live.member
            alive.add(live.member.node_id)
        return tuple(peer_of(m, live=m.node_id in alive) for m in sorted(known.values()))

    @property
    def accepting(self) -> bool:
        return not self._stopping and self._leadership is not None and self._leadership.accepting

    @property
    def serving(self) -> bool:
        return not self._receiver.diverged or self._leadership is not None

    @property
    def enough_replicas(self) -> bool:
        return self._leadership is not None and self._leadership.enough_replicas

    @property
    def sync_in_force(self) -> bool:
        return self._leadership is not None and self._leadership.sync_in_force

    def ask_for_producer_ids(self, word: str) -> None:
        if self._receiver.session is not None:
            self._receiver.session.ask(ids=word)

    def ask_for_topic(self, name: str) -> None:
        if self._receiver.session is not None:
            self._receiver.session.ask(topic=name)

    @property
    def ready(self) -> bool:
        role = self.role
        return role == "leader" or (role == "follower" and self._local.listening)

    @property
    def addresses(self) -> dict[str, str]:
        """Where the doors are, as others reach them."""
        local = self._local
        return {
            "kafka": local.kafka_address,
            "http": local.http_address,
            "replication": local.replication_address,
        }

    def say(self, level: Literal["info", "warning"], text: str) -> None:
        self._local.say(level, text)

    async def wait_ready(self) -> None:
        while not self.ready:
            await self._changes.wait()

    def _tell_changed(self) -> None:
        """The role, or what it waits for, is another now."""
        self._changes.set()
        self._changes = trio.Event()

    def status(self) -> Status:
        log, leadership = self.log, self._leadership
        changes = log.state.membership
        in_force = leadership is None or leadership.sync_in_force
        k = leadership.sync_replicas if leadership and not in_force else changes[-1][1].sync_replicas if changes else 0
        return Status(
            node_id=self.node_id,
            cluster_id=self.cluster_id,
            directory_id=self._local.me.directory_id,
            version=__version__,
            role=self.role,
            epoch=self.epoch,
            leader=self.leader,
            mode="sync" if k else "async",
            sync_replicas=k,
            sync_in_force=in_force,
            acks_all_means=acks_all_means(k, in_force=in_force),
            ready=self.ready,
            uptime_s=trio.current_time() - self._began,
            log=log_status(log, self._disk.free_bytes()),
            members=self.peers,
            followers=leadership.followers() if leadership else (),
            events=tuple(self._local.events),
            diverged="" if self.serving else self._receiver.diverged,
            enough_replicas=leadership is None or self.enough_replicas,
            no_leader=self._no_leader(),
        )

    def _live(self) -> LiveLeader | None:
        if self._leadership is not None and self._leadership.begun and not self._leadership.deposed:
            return LiveLeader(self._local.member, self._leadership.epoch)
        return self._receiver.live()

    def _no_leader(self) -> str:
        if self._stopping or self._leadership is not None or self._live() is not None:
            return ""
        return self._waits_for if self._wants_to_lead else nobody_leads(self._local, self._receiver.last_heard())

    # ── its life ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self, doors: Mapping[str, Door], task_status: trio.TaskStatus[Node]) -> None:
        local, settings = self._local, self._local.settings
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await nursery.start(self.log.run)
            if settings.wal_receiver_enabled:
                local.replication_address = await nursery.start(
                    local.network.listen, settings.wal_receiver_bind_addr, self._receiver.serve
                )
            for name, door in doors.items():
                address = await nursery.start(door, self, settings)
                if name == "kafka" and not settings.kafka_advertised_addr:
                    local.kafka_address = str(address or local.kafka_address)
                elif name == "http":
                    local.http_address = str(address or local.http_address)
            if (known := self.log.impaired_until) is not None:
                local.say("error", NO_VOTE.format(known))
            self._wants_to_lead = self._leads_by_the_log()
            task_status.started(self)
            nursery.start_soon(self._roles)
            nursery.start_soon(
                tell_silence, local, self._receiver, lambda: "" if self._wants_to_lead else self._no_leader()
            )
            await self._stopped.wait()
            nursery.cancel_scope.cancel()
        await self.log.close()

    async def stop(self) -> None:
        """Drain and end: what was accepted is answered if it can be; `run_node` returns afterwards."""
        if self._stopping:
            return
        self._stopping = True
        self._local.say("info", "stopping")
        log = self.log
        with trio.move_on_after(STOP_TIMEOUT_S):
            try:
                await log.durable.wait(log.end)
                if self._leadership is not None and self._leadership.begun:
                    await log.committed.wait(log.end)
            except NotLeader:
                pass  # deposed meanwhile: its own kind of end
        self._stopped.set()

    async def _roles(self) -> None:
        delay = STAND_DELAY_S
        while True:
            self._wake = trio.Event()
            if self._won is None and self._wants_to_lead and self._live() is None:
                await self._stand_by_itself()
            won, self._won = self._won, None
            if won is not None:
                self._waits_for = ""
                delay = STAND_DELAY_S
                await self._lead(won)
                continue
            self._wants_to_lead = self._leads_by_the_log()
            self._tell_changed()
            with trio.move_on_after(delay * self._local.rng.uniform(0.5, 1.0) if self._wants_to_lead else 3600):
                await self._wake.wait()
            delay = min(STAND_DELAY_MAX_S, delay * 2)

    def _leads_by_the_log(self) -> bool:
        """Does it stand without being told to? After a restart either program follows the log."""
        history = self.log.state.history
        if self.log.impaired_until is not None:
            return False
        if history:
            return history[-1].leader == self.node_id or not self._local.listening
        return self._program == "leader"

    async def _lead(self, won: Won) -> None:
        me = self._local.me
        if self._local.passport.promise != epochs.Promise(won.epoch, *me):
            return  # promised away since
        leadership = self._leadership = Leadership(self._local, won.epoch, self._hand_over)
        try:
            async with trio.open_nursery() as nursery:
                run = leadership.run
                await nursery.start(lambda task_status: run(
                    accept_loss=won.accept_loss, members=won.members, task_status=task_status))  # fmt: skip
                self._local.say("info", self._ready_line(), epoch=won.epoch)
                self._tell_changed()
        except* (Deposed, NotLeader) as group:
            deposed = first_of(group)
            again = isinstance(deposed, Deposed) and deposed.again
            self._leadership = None
            self._receiver.led_until_now()
            if not again:
                await self._after_deposition(deposed)

    def _ready_line(self) -> str:
        status = self.status()
        return f"leading with {count_of(len(status.members), 'member')}; acks=all means {status.acks_all_means}"

    async def _after_deposition(self, deposed: ChronikError) -> None:
        if self._local.listening:
            self._local.say("info", "going on as a follower")
            self._wants_to_lead = False
            return
        with trio.move_on_after(HAND_OVER_TIMEOUT_S):  # let the new leader have our answer
            while self._handed_over:
                await self._changes.wait()
        raise CannotLead(
            f"deposed: {deposed}. To rejoin, start this directory with chronik-follower "
            "(or CHRONIK_WAL_RECEIVER_ENABLED=true) and, if the new leader does not know its address, run "
            "`chronik members add HOST:PORT` there"
        )

    # ── promising ────────────────────────────────────────────────────────────────────────────────────────────────

    async def promise(self, asked: epochs.Promise) -> bool:
        """Give this promise if it may be given: what is older ends first, then it is durable. Both for others and for
        this node itself."""
        async with self._promising:
            given = self._local.passport.promise
            if not epochs.may_grant(given, asked):
                return False
            if asked == given:
                return True
            if epochs.Identity(asked.node_id, asked.directory_id) != self._local.me:
                self._stand_scope.cancel()
                self._won = None
            if self._leadership is not None:
                self._leadership.depose(asked)
            await self._receiver.end_session()
            await self._local.passport.keep_promise(asked)
            return True

    def _hand_over(self, connection: Connection, asked: Handshake) -> None:
        """A follower that is to lead asks for our promise over the session that we dialled."""
        assert self._nursery is not None
        self._handed_over += 1
        self._nursery.start_soon(self._serve_handed_over, connection, asked)

    async def _serve_handed_over(self, connection: Connection, asked: Handshake) -> None:
        try:
            await self._receiver.adopt(connection, asked)
        finally:
            self._handed_over -= 1
            self._tell_changed()

    # ── standing ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _stand_by_itself(self) -> None:
        """One attempt; says why not when that changes."""
        async with self._standing:
            if self._won is not None:
                return  # by a promotion that had its turn first
            self._stand_scope = trio.CancelScope()
            with self._stand_scope:
                try:
                    self._won = await self._campaign.stand()
                except Refused as refusal:
                    if str(refusal) != self._waits_for:
                        self._waits_for = str(refusal)
                        self._local.say("warning", f"does not lead yet: {refusal}")

    async def promote(self, *, accept_loss: bool = False, say: Say = lambda text: None) -> None:
        """Lead from now on. Raises Refused with what is missing."""
        if self._stopping:
            raise Refused("this node is stopping: start it again first, or promote another one")
        async with self._standing:
            if self._leadership is not None:
                raise Refused(f"node {self.node_id} leads already, since epoch {self._leadership.epoch}")
            self._stand_scope = trio.CancelScope()
            with self._stand_scope:
                self._won = await self._campaign.stand(promoted=True, accept_loss=accept_loss, say=say)
            if self._won is None:
                raise Refused("another node asked for a later epoch meanwhile: see `chronik status`, and try again")
            self._wake.set()
        epoch = self._won.epoch
        with trio.move_on_after(BEGIN_TIMEOUT_S):
            while not (self._leadership is not None and self._leadership.begun and self._leadership.epoch == epoch):
                await self._changes.wait()
            return
        raise Refused(f"epoch {epoch} was won but could not begin; look at this node's log")

    # ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def command(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        """What the control socket asks. Raises ChronikError, whose text is the answer."""
        match request.get("command"):
            case "status":
                return {"status": msgspec.to_builtins(self.status())}
            case "promote":
                await self.promote(accept_loss=bool(request.get("accept_loss")), say=say)
                return {"epoch": self.epoch, "message": f"node {self.node_id} leads since epoch {self.epoch}"}
            case "topics":
                return dict(msgspec.to_builtins(tables.topics(self)))
            case "groups":
                return dict(msgspec.to_builtins(tables.groups(self)))
            case "members":
                return {"members": [msgspec.to_builtins(peer) for peer in self.peers]}
            case "members-add":
                await self._as_leader().add_member(str(request.get("address", "")))
                return {"members": [msgspec.to_builtins(peer) for peer in self.peers]}
            case "members-remove":
                which = request.get("node_id", request.get("address"))
                if not isinstance(which, int | str):
                    raise Refused("which node? Its `node_id`, a number, or its `address`")
                await self._as_leader().remove_member(which)
                return {"members": [msgspec.to_builtins(peer) for peer in self.peers]}
            case other:
                raise Refused(f"{other!r} is no command of this node ({__version__}): use the `chronik` beside it")

    def _as_leader(self) -> Leadership:
        if self._leadership is None or not self._leadership.begun:
            live = self._live()
            now = f"node {live.member.node_id} leads: run it there" if live else "nobody leads: see `chronik status`"
            raise Refused(f"members are changed on the leader; {now}")
        return self._leadership


def log_status(log: Log, free_bytes: int) -> LogStatus:
    stats = log.stats
    return LogStatus(
        start=log.start,
        end=log.end,
        durable_end=log.durable.value,
        high_watermark=log.committed.value,
        end_checksum=log.end_checksum,
        segments=log.segments,
        bytes_on_disk=log.end - log.start,
        topics=sum(not topic.removed for topic in log.state.topics.values()),
        partitions=sum(1 for _ in log.state.partitions()),
        appended_frames=stats.appended_frames,
        appended_bytes=stats.appended_bytes,
        appended_records=stats.appended_records,
        groups_committed=stats.groups_committed,
        free_bytes=free_bytes,
        clock_ahead_s=log.ages.ahead_s,
        damage=tuple(f"{d.file} {d.start}..{d.end}: {d.what}" for d in log.damage),
    )
