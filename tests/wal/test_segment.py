"""A segment file's own blocks, the pure walk over its frames, and the verdict on what follows them."""

from __future__ import annotations

import random

import pytest
from crc32c import crc32c

from chronik_repl.errors import CorruptLog, FormatTooNew
from chronik_repl.positions import Checksum, Position
from chronik_repl.wal.frame import Frame, encode, topic_prefix
from chronik_repl.wal.recovery import Damaged, Torn, judge, scan
from chronik_repl.wal.segment import (
    BLOCK,
    CRC,
    HEADER,
    MARK,
    Header,
    Mark,
    best_mark,
    decode_header,
    decode_mark,
    encode_header,
    encode_mark,
    mark_offset,
    segment_name,
)

HEAD = Header(Position(2**40), Checksum(7), "cluster-ü", Position(5))


def test_header() -> None:
    block = encode_header(HEAD)
    assert len(block) == BLOCK
    assert decode_header(block, "x") == HEAD
    assert segment_name(Position(2**40)) == "00000001099511627776.wal"


def test_every_bit_of_a_header_counts() -> None:
    block = encode_header(HEAD)
    for at in range(HEADER.size + CRC.size):
        bad = bytearray(block)
        bad[at] ^= 1 << random.Random(at).randrange(8)
        with pytest.raises((CorruptLog, FormatTooNew), match="x"):
            decode_header(bytes(bad), "x")
    for size in (0, 10, HEADER.size + CRC.size - 1):
        with pytest.raises(CorruptLog):
            decode_header(block[:size], "x")


def test_a_newer_format_says_upgrade() -> None:
    raw = HEADER.pack(b"CHRONIK\0", 2, 0, 0, b"c", 0)
    with pytest.raises(FormatTooNew, match="Upgrade"):
        decode_header(raw + CRC.pack(crc32c(raw)), "x")


def test_a_mark_is_whole_or_nothing() -> None:
    mark = Mark(9, Position(100), Position(90))
    raw = encode_mark(mark)
    assert decode_mark(raw) == mark
    for at in range(len(raw)):
        bad = bytearray(raw)
        bad[at] ^= 4
        assert decode_mark(bytes(bad)) is None
    assert decode_mark(bytes(BLOCK)) is None
    assert decode_mark(raw[: MARK.size]) is None


def test_the_highest_valid_mark_wins() -> None:
    def blocks(*marks: Mark) -> bytes:
        data = bytearray(3 * BLOCK)
        for mark in marks:
            raw = encode_mark(mark)
            data[mark_offset(mark.sequence) : mark_offset(mark.sequence) + len(raw)] = raw
        return bytes(data)

    old, new = Mark(6, Position(600), Position(1)), Mark(7, Position(500), Position(2))
    assert best_mark(blocks(old, new)) == new, "not the highest position: a truncation lowers it"
    torn = bytearray(blocks(old, new))
    torn[mark_offset(7) + 3] ^= 1
    assert best_mark(bytes(torn)) == old
    assert best_mark(bytes(3 * BLOCK)) is None


def test_scan_stops_at_the_first_bytes_that_are_no_frame() -> None:
    raw, chain = b"", Checksum(3)
    ends = [50]
    for number in range(5):
        one, chain = encode(topic_prefix("t"), number, 1, 0, 0, 1, 50 + len(raw), chain, 0, (b"x" * number,))
        raw += one
        ends.append(50 + len(raw))
    for size in range(len(raw) + 1):
        seen: list[Frame] = []
        scanned = scan(memoryview(raw)[:size], Position(50), Checksum(3), 1000, seen.append)
        whole = sum(end <= 50 + size for end in ends) - 1
        assert (len(seen), scanned.end, scanned.why) == (whole, ends[whole], "")
    seen = []
    scanned = scan(memoryview(raw + bytes(100)), Position(50), Checksum(3), 1000, seen.append)
    assert (len(seen), scanned.end, scanned.chain) == (5, ends[5], chain)
    assert "magic" in scanned.why
    assert scan(memoryview(raw), Position(50), Checksum(4), 1000, seen.append).end == 50


def test_the_mark_tells_a_torn_tail_from_damage() -> None:
    assert judge(Position(100), Position(100)) == Torn(Position(100))
    assert judge(Position(150), Position(100)) == Torn(Position(150))
    assert judge(Position(99), Position(100)) == Damaged(Position(99), Position(100))
