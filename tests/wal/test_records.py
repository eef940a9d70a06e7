"""Records of every compression, written by another implementation (kafka-python) and by hand."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import cramjam
import pytest
from crc32c import crc32c
from kafka.record.default_records import DefaultRecordBatchBuilder

from chronik_repl.wal.records import BATCH, COMPRESSIONS, BadBatch, read_head, read_records, unpack


def test_every_compression_by_hand() -> None:
    for compression in COMPRESSIONS:
        batch = make_batch(compression)
        assert list(read_records(batch)) == EXPECTED, compression
        head = read_head(batch)
        assert (head.compression, head.record_count, head.base_offset) == (compression, 3, 70)


def test_records_of_another_implementation() -> None:
    for codec in (0, 1):  # the codecs that it has without further packages
        builder = DefaultRecordBatchBuilder(
            magic=2, compression_type=codec, is_transactional=0, producer_id=-1, producer_epoch=-1, base_sequence=-1,
            batch_size=1 << 20,
        )  # fmt: skip
        for n in range(100):
            builder.append(n, 1000 + n, b"k%d" % n if n % 3 else None, b"v" * n if n % 5 else None, [("h", b"x")])
        records = list(read_records(bytes(builder.build())))
        assert [record.offset for record in records] == list(range(100))
        assert records[7] == (7, 1007, b"k7", b"v" * 7, [(b"h", b"x")])
        assert records[0] == (0, 1000, None, None, [(b"h", b"x")])


def test_a_packed_bomb_is_refused_before_it_fills_the_memory() -> None:
    bomb = bytes(1 << 24)
    for compression, packed in (
        ("gzip", bytes(cramjam.gzip.compress(bomb))),
        ("lz4", bytes(cramjam.lz4.compress(bomb))),
        ("zstd", bytes(cramjam.zstd.compress(bomb))),
        ("snappy", bytes(cramjam.snappy.compress_raw(bomb))),
        ("snappy", xerial(bomb)),
    ):
        with pytest.raises(BadBatch, match=r"bytes when unpacked"):
            unpack(compression, packed, 1 << 20)
        assert unpack(compression, packed, 1 << 24) == bomb


def test_damaged_batches_raise_only_bad_batch() -> None:
    rng = random.Random(5)
    for compression in COMPRESSIONS:
        good = make_batch(compression)
        for _ in range(1500):
            bad = bytearray(good)
            for _ in range(rng.choice((1, 1, 2, 5))):
                bad[rng.randrange(len(bad))] = rng.randrange(256)
            if rng.random() < 0.3:
                del bad[rng.randrange(len(bad)) :]
            if len(bad) >= BATCH.size:  # past the checks of length and checksum
                bad[8:12] = (len(bad) - 12).to_bytes(4, "big")
                bad[16] = 2
                bad[17:21] = crc32c(bytes(bad[21:])).to_bytes(4, "big")
            with contextlib.suppress(BadBatch):
                list(read_records(bytes(bad), 1 << 20))


EXPECTED: list[Any] = [
    (70, 5000, b"key", b"value" * 50, [(b"a", b"1"), (b"b", None)]),
    (71, 5001, None, b"", []),
    (72, 4990, b"", None, []),
]


def make_batch(compression: str) -> bytes:
    records = b"".join(
        encode_record(number, time - 5000, key, value, headers)
        for number, (_, time, key, value, headers) in enumerate(EXPECTED)
    )
    packers: dict[str, Any] = {
        "none": bytes,
        "gzip": cramjam.gzip.compress,
        "snappy": xerial,
        "lz4": cramjam.lz4.compress,
        "zstd": cramjam.zstd.compress,
    }
    packed = packers[compression](records)
    attributes = COMPRESSIONS.index(compression)
    tail = BATCH.pack(0, 0, 0, 0, 0, attributes, 2, 5000, 5001, -1, -1, -1, 3)[21:] + bytes(packed)
    return BATCH.pack(70, len(tail) + 9, 4, 2, crc32c(tail), 0, 0, 0, 0, 0, 0, 0, 0)[:21] + tail


def encode_record(
    delta: int, time_delta: int, key: bytes | None, value: bytes | None, headers: list[tuple[bytes, bytes | None]]
) -> bytes:
    body = b"\0" + varint(time_delta) + varint(delta) + sized(key) + sized(value) + varint(len(headers))
    for name, content in headers:
        body += sized(name) + sized(content)
    return varint(len(body)) + body


def sized(data: bytes | None) -> bytes:
    return varint(-1) if data is None else varint(len(data)) + data


def varint(number: int) -> bytes:
    number = (number << 1) ^ (number >> 63)
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(out) + bytes([number])


def xerial(data: bytes) -> bytes:
    out = b"\x82SNAPPY\0" + b"\0\0\0\1" * 2
    for at in range(0, len(data), 100_000):
        block = bytes(cramjam.snappy.compress_raw(data[at : at + 100_000]))
        out += len(block).to_bytes(4, "big") + block
    return out
