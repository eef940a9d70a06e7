"""What leader and follower say to each other, and the feeder that turns received bytes into it. No I/O here.

Every message starts as a frame does: u16 magic, u16 version, u32 length of what follows. The magic is two letters:

    WA  a frame of the log, as it stands on disk (wal/frame.py)
    HS  handshake: who I am, my log, and the epoch I ask you to promise (0: only asking)   dialler → listener
    HA  its answer                                                                          listener → dialler
    TR  cut your log to this position; or begin anew there                                  leader → follower
    CM  the high watermark                                                                  leader → follower
    AK  durable to here, and the chain value here                                           follower → leader
    HB  heartbeat                                                                           leader → follower
    HR  its answer, with the follower's progress                                            follower → leader
    RQ  send this segment again; and, in the other direction, "here it comes"               both

Control messages are msgpack of the structs below: fields are only ever appended, with defaults, so that older and
newer versions read each other. The structs cannot hold nonsense: ranges and lengths are checked by the decoder.

What comes in is untrusted. A length above the limit is refused when the eight bytes of its header are there, before
anything more is read or made room for; so a `Feeder` holds at most one message and one receive. It raises
ProtocolError, nothing else. Frames come out as runs: a view over as many whole frames as have arrived, for
`Log.append_received`, which checks them. They are not copied: they stand where the socket put them until the disk has
them (wal/arena.py).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, NamedTuple

import msgspec

from chronik_repl.errors import ProtocolError
from chronik_repl.wal.arena import Arenas
from chronik_repl.wal.changes import HistoryEntry
from chronik_repl.wal.frame import FRAME_BYTES_MAX_DEFAULT, HEAD, LENGTH_MIN
from chronik_repl.wal.frame import MAGIC as FRAME_MAGIC
from chronik_repl.wal.frame import VERSION as FRAME_VERSION

PROTOCOL = 1  # of the conversation; the version in each control message's header
CONTROL_BYTES_MAX = 1024 * 1024
ARENA_BYTES_MIN = 16 * 1024  # for those who only say control messages
ARENA_BYTES_MAX = 4 * 1024 * 1024
DROP_BYTES = 4096
HISTORY_ENTRIES_MAX = 10_000  # the newest; two logs that share none of them begin anew

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
NodeNumber = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]  # 0: nobody
EpochNumber = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Chain = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
ShortText = Annotated[str, msgspec.Meta(max_length=64)]
Address = Annotated[str, msgspec.Meta(max_length=300)]
Reason = Annotated[str, msgspec.Meta(max_length=2000)]
History = Annotated[tuple[HistoryEntry, ...], msgspec.Meta(max_length=HISTORY_ENTRIES_MAX)]


class Purpose(IntEnum):
    """Why someone dials."""

    ASK = 0  # changes nothing: promise, log, and the live leader heard
    TAKE = 1  # promise me this epoch; I do not lead it yet
    SHIP = 2  # I lead this epoch, its start is durable here: a session begins


class Answer(IntEnum):
    """The status of an `HA`. Everything but OK comes with a reason in words."""

    OK = 0
    PROMISED = 1  # a later epoch, or this one to another node: see promised_epoch and promised_node
    OTHER_CLUSTER = 2
    OTHER_PROTOCOL = 3
    SAME_DIRECTORY = 4  # two live nodes with one directory id: one of them is a copy
    SAME_NODE_ID = 5
    DAMAGED = 6  # this node cannot vouch for its log now
    NOT_NOW = 7  # starting or stopping: try again


class Handshake(msgspec.Struct, frozen=True, omit_defaults=True):
    protocol: Count
    cluster_id: ShortText  # "" before a cluster is founded
    node_id: NodeNumber
    directory_id: ShortText
    epoch: EpochNumber = 0  # 0: only asking
    purpose: Purpose = Purpose.ASK
    sync: bool = False  # the mode that the log says
    log_start: Count = 0
    log_end: Count = 0
    history: History = ()
    replication_address: Address = ""
    kafka_address: Address = ""
    http_address: Address = ""
    rack: ShortText = ""
    high_watermark: Count = 0


class HandshakeAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    status: Answer
    reason: Reason
    protocol: Count
    cluster_id: ShortText
    node_id: NodeNumber
    directory_id: ShortText
    promised_epoch: EpochNumber = 0
    promised_node: NodeNumber = 0
    promised_directory: ShortText = ""
    live_leader: NodeNumber = 0  # whom this node hears, or itself if it leads; 0: nobody
    live_epoch: EpochNumber = 0
    log_start: Count = 0
    log_end: Count = 0  # read after the promise; with what is appended and not yet synced
    end_checksum: Chain = 0
    durable_end: Count = 0
    high_watermark: Count = 0
    history: History = ()
    replication_address: Address = ""
    kafka_address: Address = ""
    http_address: Address = ""
    rack: ShortText = ""
    live_replication_address: Address = ""
    live_kafka_address: Address = ""
    live_http_address: Address = ""


class Truncate(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sent at the start of every session, also when there is nothing to cut: after it the logs are the same up to
    `position`, and only then may the follower believe a high watermark."""

    epoch: EpochNumber
    position: Count
    checksum: Chain  # the chain value there; a follower that has another one says so and stops
    anew: bool = False  # forget everything and begin at `position`, a segment's start
    loss_accepted: bool = False  # this epoch, or one before it, began with the operator's --accept-loss


class Committed(msgspec.Struct, frozen=True, omit_defaults=True):
    position: Count
    drained: Count = 0  # the leader stopped accepting and its log ends here; 0: it did not


class Ack(msgspec.Struct, frozen=True, omit_defaults=True):
    position: Count
    checksum: Chain
    drain: bool = False  # this follower is to lead: stop accepting and send me the rest
    ids_asked: Reason = ""  # producer ids for its clients, please; the answer stands in the log, under this word
    topic_asked: Reason = ""  # a client of its uses a topic that is not there yet


class Heartbeat(msgspec.Struct, frozen=True, omit_defaults=True):
    sent_ms: Count
    high_watermark: Count
    log_end: Count
    drained: Count = 0
    log_start: Count = 0


class HeartbeatAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    sent_ms: Count  # of the heartbeat
    position: Count
    checksum: Chain
    high_watermark: Count = 0
    diverged: Reason = ""  # why this follower serves no reads


class SegmentAgain(msgspec.Struct, frozen=True, omit_defaults=True):
    """Follower → leader: `start` alone. Leader → follower: with `end` and `chain`, then the frames in between; or
    with `bad`, when its own copy cannot be read either."""

    start: Count
    end: Count = 0
    chain: Chain = 0
    bad: Reason = ""


Message = Handshake | HandshakeAnswer | Truncate | Committed | Ack | Heartbeat | HeartbeatAnswer | SegmentAgain


class Frames(NamedTuple):
    """Whole frames, one after another, lengths checked and nothing else. Nothing else is put there while a view on
    them is held."""

    view: memoryview


_MAGIC_OF: dict[type, int] = {
    kind: int.from_bytes(letters, "big")
    for kind, letters in (
        (Handshake, b"HS"),
        (HandshakeAnswer, b"HA"),
        (Truncate, b"TR"),
        (Committed, b"CM"),
        (Ack, b"AK"),
        (Heartbeat, b"HB"),
        (HeartbeatAnswer, b"HR"),
        (SegmentAgain, b"RQ"),
    )
}
_DECODERS: dict[int, msgspec.msgpack.Decoder[Message]] = {
    magic: msgspec.msgpack.Decoder(kind) for kind, magic in _MAGIC_OF.items()
}
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    body = _encoder.encode(message)
    assert len(body) <= CONTROL_BYTES_MAX, f"our own {type(message).__name__} is too long: {len(body)} bytes"
    return HEAD.pack(_MAGIC_OF[type(message)], PROTOCOL, len(body)) + body


def newest(history: tuple[HistoryEntry, ...] | list[HistoryEntry]) -> tuple[HistoryEntry, ...]:
    """As much of a history as a handshake carries."""
    return tuple(history[-HISTORY_ENTRIES_MAX:])


def _decode(magic: int, body: bytes | memoryview) -> Message:
    try:
        message: Message = _DECODERS[magic].decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"unreadable {_name(magic)} message: {error}") from error
    if isinstance(message, Handshake | HandshakeAnswer):
        _check_history(message.history, message.log_end)
    return message


def _check_history(history: tuple[HistoryEntry, ...], log_end: int) -> None:
    """Epochs only grow and each starts inside the log: the rest of the code relies on it."""
    epoch, start = 0, -1
    for entry in history:
        if entry.epoch <= epoch or entry.start <= start or entry.start >= log_end or entry.leader <= 0:
            raise ProtocolError(
                f"a history that cannot be: epoch {entry.epoch} at {entry.start} after {epoch} at {start}"
            )
        epoch, start = entry.epoch, entry.start


def _name(magic: int) -> str:
    letters = magic.to_bytes(2, "big")
    return letters.decode() if letters.isalnum() else f"{magic:#06x}"


class Feeder:
    """Bytes in, messages out.

    Put what is received into `room` and say how much by `fed`, then call `next_event` until it returns None.
    `frame_bytes_max` is the largest frame that is taken; 0 before the handshake, when no frame has any business here.
    """

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX_DEFAULT, control_bytes_max: int = CONTROL_BYTES_MAX):
        self.frame_bytes_max = frame_bytes_max
        self.control_bytes_max = control_bytes_max
        self._arenas = Arenas()
        self._arena_bytes = ARENA_BYTES_MIN
        self._arena = self._arenas.take(ARENA_BYTES_MIN)
        self._view = memoryview(self._arena)
        self._at = 0  # what stands before was looked at
        self._end = 0  # received up to here
        self._lent = False  # frames of this arena were handed out, and someone may still look at them
        self._need_bytes = HEAD.size  # nothing can come out before this many are here

    @property
    def held_bytes(self) -> int:
        """Of a message that has not wholly arrived. A deadline belongs to it as long as this is not 0."""
        return self._end - self._at

    @property
    def needed_bytes(self) -> int:
        """Of the message that comes next, as far as is known: its size once its header is there."""
        return self._need_bytes

    def room(self, least: int = 1) -> memoryview:
        """Where the next bytes go: for the whole of the message that is coming, and for `least` bytes."""
        at, end = self._at, self._end
        if at == end and not self._lent:
            at = end = self._at = self._end = 0
        free, held = len(self._view) - end, end - at
        cramped = held < DROP_BYTES and free < len(self._view) // 8  # it costs little to go on where there is more
        if free < least or free < self._need_bytes - held or cramped:
            self._move(max(self._need_bytes, held + least))
            end = self._end
        return self._view[end:]

    def _move(self, size: int) -> None:
        """To another arena, with what has begun to arrive. They grow while they are filled."""
        held = self._view[self._at : self._end]
        if self._lent:
            self._arena_bytes = min(ARENA_BYTES_MAX, 4 * self._arena_bytes)
        arena = self._arenas.take(max(size, self._arena_bytes))
        view = memoryview(arena)
        view[: len(held)] = held
        self._arenas.give_back(self._arena)
        self._arena, self._view = arena, view
        self._at, self._end, self._lent = 0, len(held), False

    def fed(self, size: int) -> None:
        """So many bytes were put into `room`."""
        self._end += size

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """For those who have the bytes somewhere else: a copy."""
        self.room(len(data))[: len(data)] = data
        self._end += len(data)

    def next_event(self) -> Message | Frames | None:
        """The next message, or a run of frames; None when more bytes are needed. After an error the stream is lost."""
        at, end = self._at, self._end
        if end - at < self._need_bytes:
            return None
        view = self._view
        done = self._frame_run(view, at, end)
        self._need_bytes = HEAD.size
        if done > at:
            self._at, self._lent = done, True
            return Frames(view[at:done])
        magic, version, length = HEAD.unpack_from(view, at)
        if magic == FRAME_MAGIC:  # one that has not wholly arrived
            self._need_bytes = HEAD.size + length
            return None
        if magic not in _DECODERS:
            raise ProtocolError(f"not a message of ours: it starts with {bytes(view[at : at + 8])!r}")
        if length > self.control_bytes_max:
            raise ProtocolError(f"{_name(magic)} message of {length} bytes; {self.control_bytes_max} are allowed")
        size = HEAD.size + length
        if end - at < size:
            self._need_bytes = size
            return None
        if version != PROTOCOL and magic != _MAGIC_OF[Handshake]:  # the handshake itself says who speaks what
            raise ProtocolError(f"{_name(magic)} message of version {version}; this program speaks {PROTOCOL}")
        message = _decode(magic, view[at + HEAD.size : at + size])
        self._at = at + size
        return message

    def _frame_run(self, view: memoryview, start: int, end: int) -> int:
        """Where the whole frames end that stand at `start`."""
        at, size_max = start, self.frame_bytes_max
        unpack = HEAD.unpack_from
        while end - at >= HEAD.size:
            magic, version, length = unpack(view, at)
            if magic != FRAME_MAGIC:
                break
            size = HEAD.size + length
            if version != FRAME_VERSION or length < LENGTH_MIN or size > size_max:
                if at > start:  # let what is good go first
                    break
                raise ProtocolError(
                    f"frame of {size} bytes, version {version}; the limit is {size_max}, version {FRAME_VERSION}"
                )
            if end - at < size:
                break
            at += size
        return at
