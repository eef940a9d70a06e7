"""Where a node stands: what the role hands to the front doors, as plain values.

The doors (Kafka, HTTP) never reach into replication. They hold a `House`: the log, and where the node stands now.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from chronik_repl.meters import Meters
from chronik_repl.wal.changes import Member
from chronik_repl.wal.log import Log
from chronik_repl.words import count_of

Role = Literal["starting", "leader", "follower", "stopping"]
FollowerState = Literal["connecting", "catch-up", "streaming", "refused", "diverged"]


class Peer(msgspec.Struct, frozen=True):
    """A member of the cluster as this node knows it."""

    node_id: int
    directory_id: str = ""
    replication_address: str = ""
    kafka_address: str = ""
    http_address: str = ""
    rack: str = ""
    live: bool = False


def peer_of(member: Member, *, live: bool) -> Peer:
    return Peer(
        member.node_id,
        member.directory_id,
        member.replication_address,
        member.kafka_address,
        member.http_address,
        member.rack,
        live,
    )


class FollowerStatus(msgspec.Struct, frozen=True):
    """One follower as its leader sees it."""

    node_id: int  # 0 while nobody knows who it is: no member, and never answered
    address: str
    state: FollowerState
    detail: str = ""
    member: bool = False
    durable_end: int = 0
    lag_positions: int = 0
    lag_records: int = 0
    lag_seconds: float = 0.0
    ring_frames: int = 0
    ring_bytes: int = 0
    ring_drops: int = 0  # times that the ring lapped the reader
    sent_bytes: int = 0
    acks: int = 0
    reconnects: int = 0
    truncations: int = 0
    parity_mismatches: int = 0
    parity_position: int = 0  # how far its chain was last seen equal to ours


class Event(msgspec.Struct, frozen=True):
    """A change of state, as in the log line."""

    time_ms: int
    level: Literal["info", "warning", "error"]
    text: str


class LogStatus(msgspec.Struct, frozen=True):
    start: int
    end: int
    durable_end: int
    high_watermark: int
    end_checksum: int
    segments: int
    bytes_on_disk: int
    topics: int
    partitions: int
    appended_frames: int
    appended_bytes: int
    appended_records: int
    groups_committed: int
    free_bytes: int
    damage: tuple[str, ...] = ()  # the scrubber's findings
    clock_ahead_s: float = 0.0  # by a leap that is not believed


class Status(msgspec.Struct, frozen=True):
    """`/status`, and what `chronik status` and the page draw."""

    node_id: int
    cluster_id: str
    directory_id: str
    version: str
    role: Role
    epoch: int
    leader: Peer | None
    mode: Literal["async", "sync"]
    sync_replicas: int
    sync_in_force: bool  # as House says
    acks_all_means: str  # in words: what acks=all waits for, or why it is refused
    ready: bool
    uptime_s: float
    log: LogStatus
    members: tuple[Peer, ...] = ()
    followers: tuple[FollowerStatus, ...] = ()  # on the leader
    events: tuple[Event, ...] = ()
    diverged: str = ""  # on a follower: why it serves no reads
    enough_replicas: bool = True  # on the leader: acks=all is not refused for want of followers
    no_leader: str = ""  # where nobody leads, as far as this node hears: who led last, and what to do


def acks_all_means(sync_replicas: int, *, in_force: bool = True) -> str:
    """In words that go on from "acks=all means"."""
    if not sync_replicas:
        return "durable on the leader alone"
    followers = count_of(sync_replicas, "follower")
    if not in_force:
        return f"NOT_ENOUGH_REPLICAS until {followers} {'has' if sync_replicas == 1 else 'have'} joined"
    return f"durable on the leader and {followers}"


class House(Protocol):
    """What a front door may see of its node."""

    @property
    def log(self) -> Log: ...

    @property
    def role(self) -> Role: ...

    @property
    def epoch(self) -> int:
        """The epoch that this node leads or follows."""

    @property
    def node_id(self) -> int: ...

    @property
    def cluster_id(self) -> str: ...

    @property
    def leader(self) -> Peer | None: ...

    @property
    def peers(self) -> tuple[Peer, ...]:
        """All members, this node among them."""

    @property
    def accepting(self) -> bool:
        """True while this node leads, its epoch's start is durable, and it is not draining."""

    @property
    def serving(self) -> bool:
        """May reads be answered here? False on a follower that differs from its leader."""

    @property
    def enough_replicas(self) -> bool:
        """Are as many followers live as acks=all needs? Always true in async mode."""

    @property
    def sync_in_force(self) -> bool:
        """On the leader: is what is committed on as many disks as the operator asked for? False while a sync cluster
        begins, until that many followers are members: nothing is promised meanwhile."""

    def ask_for_producer_ids(self, word: str) -> None:
        """On a follower: ask the leader for some. They come in the log's state, `ids_given`, under this word."""

    def ask_for_topic(self, name: str) -> None:
        """On a follower: ask the leader to make it. It comes in the log, or not."""

    @property
    def ready(self) -> bool: ...

    @property
    def meters(self) -> Meters:
        """Where the doors count what they do, for /metrics."""

    def status(self) -> Status: ...
