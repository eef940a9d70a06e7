"""The frame's bytes: what is written is read; nothing else is."""

from __future__ import annotations

import struct

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from chronik_repl.wal.frame import (
    FRAME_BYTES_MAX_DEFAULT,
    HEAD,
    OVERHEAD,
    TOPIC_PATTERN,
    BadFrame,
    Kind,
    decode,
    encode,
    topic_prefix,
)

topics = st.from_regex(r"[A-Za-z0-9._-]{0,249}", fullmatch=True)
u32 = st.integers(0, 2**32 - 1)


def frame(topic: str = "orders", data: bytes = b"payload", position: int = 77, previous: int = 5) -> bytes:
    return encode(topic_prefix(topic), 10, 3, 1_700_000_000_000, Kind.DATA, 4, position, previous, 2, (data,))[0]


@given(
    topics,
    st.integers(-(2**31), 2**31 - 1),
    st.integers(-(2**63), 2**63 - 1),
    u32,
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from(list(Kind)),
    u32,
    st.integers(0, 2**64 - 1),
    u32,
    st.lists(st.binary(max_size=100), max_size=3),
    st.binary(max_size=20),
)
def test_what_is_written_is_read(
    topic: str,
    partition: int,
    base: int,
    count: int,
    time: int,
    kind: int,
    epoch: int,
    position: int,
    previous: int,
    pieces: list[bytes],
    before: bytes,
) -> None:
    raw, checksum = encode(
        topic_prefix(topic), base, count, time, kind, epoch, position, previous, partition, tuple(pieces)
    )
    got = decode(memoryview(before + raw + b"after"), len(before), position, previous)
    assert got is not None
    assert (got.topic, got.partition, got.base_offset, got.record_count) == (topic.encode(), partition, base, count)
    assert (got.timestamp_ms, got.kind, got.epoch, got.position) == (time, kind, epoch, position)
    assert (got.previous, got.checksum, got.size) == (previous, checksum, len(raw))
    assert got.data == b"".join(pieces)
    assert len(raw) == OVERHEAD + len(topic) + len(got.data)


def test_every_bit_counts() -> None:
    raw = frame()
    for at in range(len(raw)):
        for bit in range(8):
            bad = bytearray(raw)
            bad[at] ^= 1 << bit
            try:
                got = decode(memoryview(bad), 0, 77, 5)
            except BadFrame:
                continue
            assert got is None, f"byte {at} bit {bit}"
            assert at < 8, "only a length may make it look unfinished"


def test_every_end_is_unfinished() -> None:
    raw = frame()
    for size in range(len(raw)):
        assert decode(memoryview(raw)[:size], 0, 77, 5) is None


def test_a_good_frame_of_another_place_or_chain() -> None:
    raw = memoryview(frame())
    with pytest.raises(BadFrame, match="stands at 78"):
        decode(raw, 0, 78, 5)
    with pytest.raises(BadFrame, match="follows another"):
        decode(raw, 0, 77, 6)
    assert decode(raw, 0, 77, None) is not None


def test_lengths_are_refused_before_they_are_believed() -> None:
    for length in (0, OVERHEAD - 9, 2**32 - 1, FRAME_BYTES_MAX_DEFAULT):
        with pytest.raises(BadFrame, match="are allowed"):
            decode(memoryview(HEAD.pack(0x5741, 2, length)), 0, 77, 5)
    short = bytearray(frame("", b""))
    struct.pack_into(">H", short, 8, 200)
    with pytest.raises(BadFrame, match="topic of 200 bytes"):
        decode(memoryview(short), 0, 77, 5)


def test_an_unknown_kind_or_version() -> None:
    raw, _ = encode(topic_prefix(""), 0, 0, 0, 5, 0, 0, 0, 0, ())
    with pytest.raises(BadFrame, match="newer"):
        decode(memoryview(raw), 0, 0, 0)
    with pytest.raises(BadFrame, match="version 1"):
        decode(memoryview(HEAD.pack(0x5741, 1, 100) + bytes(100)), 0, 0, 0)


def test_zeros_are_no_frame() -> None:
    with pytest.raises(BadFrame, match="magic"):
        decode(memoryview(bytes(100)), 0, 0, 0)


def test_the_checksum_is_crc32c_of_all_but_itself() -> None:
    raw = frame()
    at = 10 + len("orders") + 42
    assert struct.unpack_from(">I", raw, at)[0] == crc32c(raw[:at] + raw[at + 4 :])


def test_topic_names() -> None:
    for good in ("a", "orders.v2", "A-b_c.9", "x" * 249):
        assert TOPIC_PATTERN.match(good)
    for bad in ("", "a/b", "a b", "ü", "x" * 250, "a\n", "a\0"):
        assert not TOPIC_PATTERN.match(bad)
