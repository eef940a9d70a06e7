"""What stands in frames that are not data: msgpack of the structs here. Only ever append fields, with defaults.

Each is a decision of the leader, written once and folded by every node in the same way (state.py). The frame's own
fields carry epoch, position and time; these carry the rest.
"""

from __future__ import annotations

import msgspec

from chronik_repl.errors import ProtocolError


class Member(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A directory that counts. A wiped node has a new directory id and so is another member."""

    node_id: int
    directory_id: str
    replication_address: str = ""  # where its receiver listens; "" if it has none
    kafka_address: str = ""
    http_address: str = ""
    rack: str = ""


class HistoryEntry(msgspec.Struct, frozen=True, array_like=True):
    """One epoch in a log's history. `chain` is the checksum of the frame before its start frame, so two entries with
    the same epoch, leader, start and chain stand on the same bytes all the way down."""

    epoch: int
    leader: int
    start: int
    chain: int
    accept_loss: bool = False


class EpochStart(msgspec.Struct, frozen=True, tag="epoch-start"):
    """kind 1. From here on node `leader` writes; the frame's own epoch field is the epoch."""

    leader: int
    directory_id: str
    accept_loss: bool = False


class SnapshotPart(msgspec.Struct, frozen=True, tag="snapshot"):
    """kind 2. The state's msgpack, cut into pieces of at most 1 MiB; complete with part == parts - 1."""

    part: int
    parts: int
    piece: bytes


class SourcePosition(msgspec.Struct, frozen=True, tag="source"):
    """kind 3. Everything of this source before `lsn` stands in the log before this frame."""

    source: str
    lsn: int
    index: int = 0
    detail: dict[str, str] = {}


class MembersChanged(msgspec.Struct, frozen=True, tag="members"):
    members: tuple[Member, ...]
    sync_replicas: int  # k; 0 in async mode


class TopicMade(msgspec.Struct, frozen=True, tag="topic"):
    """A new topic, or more partitions for one that is there."""

    topic: str
    partitions: int
    configs: dict[str, str] = {}


class TopicRemoved(msgspec.Struct, frozen=True, tag="topic-removed"):
    topic: str


class LogStartMoved(msgspec.Struct, frozen=True, tag="log-start"):
    """Retention: once this is committed every node removes the segments that end at or below `start`."""

    start: int


class ProducerIdGiven(msgspec.Struct, frozen=True, tag="producer-id"):
    """This id and the `count` - 1 before it are taken. A follower that asked finds its own by `asked`."""

    producer_id: int
    count: int = 1
    asked: str = ""


class GroupMember(msgspec.Struct, frozen=True):
    member_id: str
    client_id: str = ""
    client_host: str = ""
    instance_id: str = ""
    session_timeout_ms: int = 45_000
    rebalance_timeout_ms: int = 300_000
    protocols: tuple[tuple[str, bytes], ...] = ()
    assignment: bytes = b""


class GroupChanged(msgspec.Struct, frozen=True, tag="group"):
    """A group's generation as a whole: who is in it and what each was assigned."""

    group: str
    generation: int
    protocol_type: str = "consumer"
    protocol: str = ""
    leader: str = ""
    members: tuple[GroupMember, ...] = ()


class GroupRemoved(msgspec.Struct, frozen=True, tag="group-removed"):
    group: str


class CommittedOffset(msgspec.Struct, frozen=True, array_like=True):
    topic: str
    partition: int
    offset: int  # -1 removes it
    leader_epoch: int = -1
    metadata: str = ""


class OffsetsCommitted(msgspec.Struct, frozen=True, tag="offsets"):
    group: str
    offsets: tuple[CommittedOffset, ...]


Change = (
    EpochStart
    | SnapshotPart
    | SourcePosition
    | MembersChanged
    | TopicMade
    | TopicRemoved
    | LogStartMoved
    | ProducerIdGiven
    | GroupChanged
    | GroupRemoved
    | OffsetsCommitted
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Change)


def encode_change(change: Change) -> bytes:
    return _encoder.encode(change)


def decode_change(data: bytes | memoryview) -> Change:
    """Raises ProtocolError for anything that is not one of the structs above."""
    try:
        change: Change = _decoder.decode(data)
        return change
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"unreadable state change: {error}") from error
