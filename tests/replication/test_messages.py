"""The feeder takes bytes in any cut and gives back what was sent, or ProtocolError; never anything else."""

from __future__ import annotations

import random
import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chronik_repl.errors import ProtocolError
from chronik_repl.replication import messages
from chronik_repl.replication.messages import (
    Ack,
    Answer,
    Committed,
    Feeder,
    Frames,
    Handshake,
    HandshakeAnswer,
    Heartbeat,
    HeartbeatAnswer,
    Message,
    Purpose,
    SegmentAgain,
    Truncate,
    encode,
)
from chronik_repl.wal import frame
from chronik_repl.wal.changes import HistoryEntry

HISTORY = (HistoryEntry(1, 1, 0, 0), HistoryEntry(4, 2, 900, 77, True))
EVERY: tuple[Message, ...] = (
    Handshake(1, "c", 1, "d1", 4, Purpose.SHIP, True, 0, 1000, HISTORY, "a:1", "a:2", "a:3", "r", 800),
    HandshakeAnswer(Answer.PROMISED, "promised away", 1, "c", 2, "d2", 5, 3, "d3", 3, 5, 0, 1000, 9, history=HISTORY),
    Truncate(4, 900, 77, loss_accepted=True),
    Committed(1000, drained=1200),
    Ack(1000, 0xFFFFFFFF, drain=True),
    Heartbeat(1, 2, 3),
    HeartbeatAnswer(1, 2, 3, 4, "diverged at 5"),
    SegmentAgain(0, 4096, 12),
)


def _frame(size: int, position: int = 0) -> bytes:
    raw, _ = frame.encode(frame.topic_prefix("t"), 0, 1, 0, 0, 1, position, 0, 0, (b"x" * size,))
    return raw


def _drain(feeder: Feeder) -> tuple[list[Message], bytes]:
    said, frames = list[Message](), b""
    while (event := feeder.next_event()) is not None:
        if isinstance(event, Frames):
            frames += event.view
        else:
            said.append(event)
    return said, frames


def _feed(data: bytes, cuts: list[int], feeder: Feeder | None = None) -> tuple[list[Message], bytes]:
    feeder = feeder or Feeder()
    said, frames = list[Message](), b""
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        feeder.feed(data[start:end])
        more, bytes_more = _drain(feeder)
        said += more
        frames += bytes_more
    assert feeder.held_bytes == 0
    return said, frames


def test_every_message_comes_back_at_every_cut() -> None:
    data = b"".join(encode(m) for m in EVERY)
    for cut in range(len(data)):
        assert tuple(_feed(data, [cut])[0]) == EVERY


def test_a_byte_at_a_time() -> None:
    data = encode(EVERY[0]) + _frame(300) + encode(EVERY[4])
    said, frames = _feed(data, list(range(1, len(data))))
    assert said == [EVERY[0], EVERY[4]]
    assert frames == _frame(300)


@given(
    st.lists(st.one_of(st.integers(0, 3000), st.sampled_from(EVERY)), max_size=12), st.randoms(use_true_random=False)
)
def test_frames_and_messages_in_any_order_and_any_cut(parts: list[int | Message], chance: random.Random) -> None:
    raw = [_frame(p) if isinstance(p, int) else encode(p) for p in parts]
    data = b"".join(raw)
    cuts = sorted(chance.randrange(len(data) + 1) for _ in range(chance.randrange(8)))
    said, frames = _feed(data, cuts)
    assert said == [p for p in parts if not isinstance(p, int)]
    assert frames == b"".join(r for r, p in zip(raw, parts, strict=True) if isinstance(p, int))


def test_a_run_holds_whole_frames_only_and_does_not_copy_them() -> None:
    data = _frame(100) * 3 + _frame(100)[:50]
    feeder = Feeder()
    room = feeder.room()
    room[: len(data)] = data
    feeder.fed(len(data))
    event = feeder.next_event()
    assert isinstance(event, Frames)
    assert len(event.view) == 3 * len(_frame(100))
    assert event.view.obj is room.obj
    assert feeder.next_event() is None
    assert feeder.held_bytes == 50
    assert feeder.needed_bytes == len(_frame(100))


@pytest.mark.parametrize("magic", [b"WA", b"HS", b"AK", b"RQ"])
def test_kf45_a_length_of_four_gigabytes_is_refused_from_its_header_alone(magic: bytes) -> None:
    version = frame.VERSION if magic == b"WA" else messages.PROTOCOL
    feeder = Feeder()
    feeder.feed(magic + version.to_bytes(2, "big") + b"\xff\xff\xff\xff")
    with pytest.raises(ProtocolError, match=r"4294967303|4294967295"):
        feeder.next_event()


def test_kf46_tls_bytes_are_not_a_length() -> None:
    feeder = Feeder()
    feeder.feed(bytes.fromhex("1603010200010001fc0303"))
    with pytest.raises(ProtocolError, match="not a message of ours"):
        feeder.next_event()


def _control(magic: bytes, body: bytes) -> bytes:
    return frame.HEAD.pack(int.from_bytes(magic, "big"), messages.PROTOCOL, len(body)) + body


@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * 100_000 + b"\xc0",  # deep
        b"\xdd\xff\xff\xff\xff",  # an array of 2³²-1
        b"\x81\xa6\xff\xff\xff\xff\xff\xff\x01",  # a key that is not text
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"position": -1, "checksum": 0}),
        msgspec.msgpack.encode({"position": 2**63, "checksum": 0}),
        msgspec.msgpack.encode({"position": "0", "checksum": 0}),
        msgspec.msgpack.encode({"position": 1, "checksum": 2**32}),
    ],
)
def test_kf47_deep_huge_or_wrong_msgpack_is_a_protocol_error(body: bytes) -> None:
    feeder = Feeder()
    feeder.feed(_control(b"AK", body))
    with pytest.raises(ProtocolError, match="unreadable AK"):
        feeder.next_event()


@pytest.mark.parametrize(
    "history",
    [
        (HistoryEntry(2, 1, 0, 0), HistoryEntry(1, 1, 10, 0)),
        (HistoryEntry(1, 1, 10, 0), HistoryEntry(2, 1, 10, 0)),
        (HistoryEntry(1, 1, 5000, 0),),
        (HistoryEntry(1, 0, 0, 0),),
        (HistoryEntry(1, 1, -1, 0),),
    ],
)
def test_a_history_that_cannot_be_is_refused(history: tuple[HistoryEntry, ...]) -> None:
    feeder = Feeder()
    feeder.feed(encode(Handshake(1, "c", 1, "d", log_end=1000, history=history)))
    with pytest.raises(ProtocolError):
        feeder.next_event()


def test_kf50_unknown_version_and_unknown_magic() -> None:
    for raw in (b"AK\x00\x09\x00\x00\x00\x01\xc0", b"ZZ\x00\x01\x00\x00\x00\x00", b"WA\x00\x03\x00\x00\x01\x00"):
        feeder = Feeder()
        feeder.feed(raw)
        with pytest.raises(ProtocolError):
            feeder.next_event()


def test_no_frame_before_the_handshake() -> None:
    feeder = Feeder(frame_bytes_max=0)
    feeder.feed(_frame(10))
    with pytest.raises(ProtocolError):
        feeder.next_event()


def test_fields_may_be_appended_and_missing_ones_have_defaults() -> None:
    newer = msgspec.msgpack.encode({"position": 5, "checksum": 6, "from_the_future": [1, 2]})
    feeder = Feeder()
    feeder.feed(_control(b"AK", newer))
    assert feeder.next_event() == Ack(5, 6)


def test_the_longest_history_fits() -> None:
    long = [HistoryEntry(e, 2**31 - 1, e * 10**12, 2**32 - 1) for e in range(1, 20_000)]
    sent = Handshake(1, "c", 1, "d", log_end=2**62, history=messages.newest(long))
    assert _feed(encode(sent), [])[0] == [sent]


def test_a_large_frame_in_small_pieces_costs_its_size() -> None:
    data = _frame(4 * 1024 * 1024)
    feeder = Feeder()
    tracemalloc.start()
    try:
        for at in range(0, len(data), 1000):
            feeder.feed(data[at : at + 1000])
            event = feeder.next_event()
        assert isinstance(event, Frames)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(data)
    finally:
        tracemalloc.stop()


@settings(max_examples=300)
@given(st.sampled_from(EVERY), st.data())
def test_a_changed_byte_gives_a_message_or_a_protocol_error(message: Message, data: st.DataObject) -> None:
    raw = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    feeder = Feeder()
    feeder.feed(bytes(raw))
    try:
        _drain(feeder)
    except ProtocolError:
        return
    assert feeder.held_bytes <= len(raw)
