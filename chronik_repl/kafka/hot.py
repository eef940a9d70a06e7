"""The two hot messages, Produce and Fetch, by codecs of our own: every version this server speaks, nothing copied.

The library's codec costs 43 µs a Produce and copies every batch; this one hands out views over the request's buffer
and takes back, for Fetch, the pieces of an answer with the batches spliced in between. tests/kafka/test_hot.py holds
it against the library's, version by version. one_batch.py is a shorter way for most Produce requests.

Raises ProtocolError for what is not such a request.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from chronik_repl.errors import ProtocolError
from chronik_repl.kafka.codec import skip_tags, uvarint

PRODUCE_FLEXIBLE = 9
FETCH_FLEXIBLE = 12
ENTRIES_MAX = 100_000  # topics and partitions of one request: a request of 100 MB must not become ten million objects
Buffer = bytes | bytearray | memoryview

_I16 = struct.Struct(">h")
_I32 = struct.Struct(">i")
_HI = struct.Struct(">hi")
_II = struct.Struct(">ii")
_HII = struct.Struct(">hii")
_IH = struct.Struct(">ih")


# ------------------------------------------------------------------------------------------------------- Produce


class ProducePartition(NamedTuple):
    partition: int
    records: memoryview | None


class Produce(NamedTuple):
    transactional_id: bool  # whether there is one
    acks: int
    timeout_ms: int
    topics: list[tuple[str, list[ProducePartition]]]


def decode_produce(view: memoryview, at: int, version: int) -> Produce:
    """Versions 0 to 12. The views in it live as long as the request's buffer does."""
    try:
        if version >= PRODUCE_FLEXIBLE:
            return _decode_produce_flexible(view, at)
        return _decode_produce_fixed(view, at, version)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ProtocolError(f"unreadable Produce v{version}: {error}") from error


def _decode_produce_fixed(view: memoryview, at: int, version: int) -> Produce:
    end = len(view)
    transactional = False
    if version >= 3:
        (size,) = _I16.unpack_from(view, at)
        at += 2
        if size >= 0:
            transactional = True
            at += size
    acks, timeout_ms, topic_count = _HII.unpack_from(view, at)
    at += 10
    room = _checked(topic_count, ENTRIES_MAX)
    topics: list[tuple[str, list[ProducePartition]]] = []
    for _ in range(topic_count):
        (size,) = _I16.unpack_from(view, at)
        at += 2
        if size < 0:
            raise ProtocolError("Produce: a topic's name is null")
        topic = str(view[at : at + size], "utf-8")
        at += size
        (count,) = _I32.unpack_from(view, at)
        at += 4
        room = _checked(count, room)
        partitions: list[ProducePartition] = []
        for _ in range(count):
            index, size = _II.unpack_from(view, at)
            at += 8
            if size < 0:
                partitions.append(ProducePartition(index, None))
                continue
            partitions.append(ProducePartition(index, view[at : at + size]))
            at += size
            if at > end:
                raise ProtocolError("Produce: records end behind the request")
        topics.append((topic, partitions))
    if at != end:
        raise ProtocolError(f"Produce v{version} of {end} bytes ends at {at}")
    return Produce(transactional, acks, timeout_ms, topics)


def _decode_produce_flexible(view: memoryview, at: int) -> Produce:
    end = len(view)
    size, at = uvarint(view, at)
    transactional = size > 0
    if transactional:
        at += size - 1
    acks, timeout_ms = _HI.unpack_from(view, at)
    topic_count, at = uvarint(view, at + 6)
    room = _checked(topic_count - 1, ENTRIES_MAX)
    topics: list[tuple[str, list[ProducePartition]]] = []
    for _ in range(topic_count - 1):
        size, at = uvarint(view, at)
        if size == 0:
            raise ProtocolError("Produce: a topic's name is null")
        topic = str(view[at : at + size - 1], "utf-8")
        count, at = uvarint(view, at + size - 1)
        room = _checked(count - 1, room)
        partitions: list[ProducePartition] = []
        for _ in range(count - 1):
            (index,) = _I32.unpack_from(view, at)
            size, at = uvarint(view, at + 4)
            records = None
            if size > 0:
                records = view[at : at + size - 1]
                at += size - 1
                if at > end:
                    raise ProtocolError("Produce: records end behind the request")
            partitions.append(ProducePartition(index, records))
            at = skip_tags(view, at)
        topics.append((topic, partitions))
        at = skip_tags(view, at)
    at = skip_tags(view, at)
    if at != end:
        raise ProtocolError(f"Produce of {end} bytes ends at {at}")
    return Produce(transactional, acks, timeout_ms, topics)


class Produced(NamedTuple):
    """The answer for one partition."""

    partition: int
    code: int
    base_offset: int = -1
    timestamp_ms: int = -1  # log append time; -1: the producer's own stand
    log_start_offset: int = -1
    message: str | None = None


class Leader(NamedTuple):
    """Where a client that asked the wrong node should go (KIP-951): in answers from Produce 10, Fetch 12."""

    node_id: int
    epoch: int
    host: str = ""
    port: int = 0
    rack: str | None = None


_PRODUCED_2 = struct.Struct(">ihqq")  # index, code, base offset, log append time
_PRODUCED_5 = struct.Struct(">ihqqq")  # and log start offset


def encode_produced(
    version: int,
    correlation_id: int,
    topics: Sequence[tuple[str, Sequence[Produced]]],
    leader: Leader | None = None,
) -> bytes:
    """The whole answer. `leader` is told to clients that can hear it, beside every code that is not 0."""
    flexible = version >= PRODUCE_FLEXIBLE
    pieces: list[bytes] = [b""]
    add = pieces.append
    add(_I32.pack(correlation_id) + b"\0" if flexible else _I32.pack(correlation_id))
    add(_count(len(topics), flexible))
    for topic, partitions in topics:
        add(_string(topic, flexible))
        add(_count(len(partitions), flexible))
        for done in partitions:
            index, code, base_offset, timestamp_ms, log_start, message = done
            if version >= 5:
                add(_PRODUCED_5.pack(index, code, base_offset, timestamp_ms, log_start))
            elif version >= 2:
                add(_PRODUCED_2.pack(index, code, base_offset, timestamp_ms))
            else:
                add(_PRODUCED_2.pack(index, code, base_offset, timestamp_ms)[:14])
            if flexible:
                add(b"\x01\0" if message is None else b"\x01" + _string(message, True))
                if code and leader is not None and version >= 10:
                    add(_CURRENT_LEADER.pack(1, 0, 9, leader.node_id, leader.epoch, 0))
                else:
                    add(b"\0")
            elif version >= 8:
                add(b"\0\0\0\0" + (b"\xff\xff" if message is None else _string(message, False)))
        if flexible:
            add(b"\0")
    if version >= 1:
        add(b"\0\0\0\0")  # throttle time
    if flexible:
        if version >= 10 and leader is not None and leader.host and any(p.code for _, ps in topics for p in ps):
            add(b"\x01\x00" + _sized(_endpoints(leader)))
        else:
            add(b"\0")
    pieces[0] = _I32.pack(sum(map(len, pieces)))
    return b"".join(pieces)


_CURRENT_LEADER = struct.Struct(">BBBiiB")  # one tag; its number, its size; node id, epoch; no tags in it


def _endpoints(leader: Leader) -> bytes:
    return b"".join(
        (
            b"\x02",  # an array of one
            _I32.pack(leader.node_id),
            _string(leader.host, True),
            _I32.pack(leader.port),
            b"\0" if leader.rack is None else _string(leader.rack, True),
            b"\0",
        )
    )


# --------------------------------------------------------------------------------------------------------- Fetch


class FetchPartition(NamedTuple):
    partition: int
    leader_epoch: int  # -1: the client does not know
    offset: int
    bytes_max: int


class Fetch(NamedTuple):
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    session_id: int
    session_epoch: int
    topics: list[tuple[str, list[FetchPartition]]]
    rack: str


_FETCH_3 = struct.Struct(">iiiib")  # replica id, max wait, min bytes, max bytes, isolation level
_FETCH_4 = struct.Struct(">iqi")  # partition, offset, max bytes
_FETCH_5 = struct.Struct(">iqqi")  # partition, offset, log start, max bytes
_FETCH_9 = struct.Struct(">iiqqi")  # partition, leader epoch, offset, log start, max bytes
_FETCH_12 = struct.Struct(">iiqiqi")  # partition, leader epoch, offset, last fetched epoch, log start, max bytes


def decode_fetch(view: memoryview, at: int, version: int) -> Fetch:
    """Versions 4 to 12."""
    try:
        return _decode_fetch(view, at, version)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ProtocolError(f"unreadable Fetch v{version}: {error}") from error


def _decode_fetch(view: memoryview, at: int, version: int) -> Fetch:
    flexible = version >= FETCH_FLEXIBLE
    _, max_wait_ms, min_bytes, max_bytes, _ = _FETCH_3.unpack_from(view, at)
    at += 17
    session_id, session_epoch = 0, -1
    if version >= 7:
        session_id, session_epoch = _II.unpack_from(view, at)
        at += 8
    count, at = _read_count(view, at, flexible)
    topics: list[tuple[str, list[FetchPartition]]] = []
    for _ in range(count):
        topic, at = _read_string(view, at, flexible)
        count, at = _read_count(view, at, flexible)
        partitions: list[FetchPartition] = []
        for _ in range(count):
            epoch = -1
            if flexible:
                index, epoch, offset, _, _, bytes_max = _FETCH_12.unpack_from(view, at)
                at = skip_tags(view, at + 32)
            elif version >= 9:
                index, epoch, offset, _, bytes_max = _FETCH_9.unpack_from(view, at)
                at += 28
            elif version >= 5:
                index, offset, _, bytes_max = _FETCH_5.unpack_from(view, at)
                at += 24
            else:
                index, offset, bytes_max = _FETCH_4.unpack_from(view, at)
                at += 16
            partitions.append(FetchPartition(index, epoch, offset, bytes_max))
        topics.append((topic, partitions))
        if flexible:
            at = skip_tags(view, at)
    if version >= 7:
        count, at = _read_count(view, at, flexible)
        for _ in range(count):  # what a session forgets; there are no sessions
            _, at = _read_string(view, at, flexible)
            count, at = _read_count(view, at, flexible)
            at += 4 * count
            if at > len(view):
                raise ProtocolError("Fetch: forgotten partitions end behind the request")
            if flexible:
                at = skip_tags(view, at)
    rack = ""
    if version >= 11:
        rack, at = _read_string(view, at, flexible)
    if flexible:
        at = skip_tags(view, at)  # the cluster id among them: a session of another cluster fails elsewhere
    if at != len(view):
        raise ProtocolError(f"Fetch v{version} of {len(view)} bytes ends at {at}")
    return Fetch(max_wait_ms, min_bytes, max_bytes, session_id, session_epoch, topics, rack)


class FetchedPartition(NamedTuple):
    """The answer for one partition. `records` are whole batches, sent as they are."""

    partition: int
    code: int
    high_watermark: int = -1
    log_start_offset: int = -1
    records: Sequence[Buffer] = ()
    preferred_replica: int = -1


_FETCHED_4 = struct.Struct(">ihqqi")  # partition, code, high watermark, last stable offset; no aborted transactions
_FETCHED_5 = struct.Struct(">ihqqqi")  # and log start offset
_FETCHED_12 = struct.Struct(">ihqqqBi")  # the same, an array's length in one byte; preferred replica


def encode_fetched(
    version: int,
    correlation_id: int,
    topics: Sequence[tuple[str, Sequence[FetchedPartition]]],
    leader: Leader | None = None,
    code: int = 0,
) -> list[Buffer]:
    """The whole answer in pieces, ready for a gathering send: the batches are not copied."""
    flexible = version >= FETCH_FLEXIBLE
    pieces: list[Buffer] = [b""]
    head: list[bytes] = [_I32.pack(correlation_id), b"\0\0\0\0\0" if flexible else b"\0\0\0\0"]
    if version >= 7:
        head.append(_HI.pack(code, 0))
    head.append(_count(len(topics), flexible))
    for topic, partitions in topics:
        head.append(_string(topic, flexible))
        head.append(_count(len(partitions), flexible))
        for done in partitions:
            index, error, high, log_start, records, preferred = done
            size = sum(map(len, records))
            if flexible:
                head.append(_FETCHED_12.pack(index, error, high, high, log_start, 0, preferred))
                head.append(_varint(size + 1))
            elif version >= 5:
                head.append(_FETCHED_5.pack(index, error, high, high, log_start, -1))
                head.append(_II.pack(preferred, size) if version >= 11 else _I32.pack(size))
            else:
                head.append(_FETCHED_4.pack(index, error, high, high, -1))
                head.append(_I32.pack(size))
            if records:
                pieces.append(b"".join(head))
                head.clear()
                pieces.extend(records)
            if flexible:
                if error and leader is not None:
                    head.append(_CURRENT_LEADER.pack(1, 1, 9, leader.node_id, leader.epoch, 0))
                else:
                    head.append(b"\0")
        if flexible:
            head.append(b"\0")
    if flexible:
        head.append(b"\0")
    pieces.append(b"".join(head))
    pieces[0] = _I32.pack(sum(map(len, pieces)))
    return pieces


# ------------------------------------------------------------------------------------------------------ the parts


def _checked(count: int, room: int) -> int:
    """What remains of `room`, the bound on a request's topics and partitions together."""
    if not 0 <= count <= room:
        raise ProtocolError(f"an array of {count} elements")
    return room - count


def _read_count(view: memoryview, at: int, flexible: bool) -> tuple[int, int]:
    if flexible:
        count, at = uvarint(view, at)
        count -= 1
    else:
        (count,) = _I32.unpack_from(view, at)
        at += 4
    if not 0 <= count <= ENTRIES_MAX:
        raise ProtocolError(f"an array of {count} elements")
    return count, at


def _read_string(view: memoryview, at: int, flexible: bool) -> tuple[str, int]:
    if flexible:
        size, at = uvarint(view, at)
        size -= 1
    else:
        (size,) = _I16.unpack_from(view, at)
        at += 2
    if size < 0:
        raise ProtocolError("a null where a name must stand")
    if at + size > len(view):
        raise ProtocolError("a name ends behind its request")
    return str(view[at : at + size], "utf-8"), at + size


def _varint(value: int) -> bytes:
    if value < 0x80:
        return value.to_bytes(1, "big")
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _count(value: int, flexible: bool) -> bytes:
    return _varint(value + 1) if flexible else _I32.pack(value)


def _string(value: str, flexible: bool) -> bytes:
    raw = value.encode()
    return (_varint(len(raw) + 1) if flexible else _I16.pack(len(raw))) + raw


def _sized(value: bytes) -> bytes:
    return _varint(len(value)) + value
