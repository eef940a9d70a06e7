"""The test vectors, read by a reader that is written from docs/protocol.md alone, and by ours; and made again.

`python -m tests.wal.test_vectors` writes them anew; a change of theirs is a change of the format.
"""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import msgspec
import trio
import trio.testing

from chronik_repl.positions import CHAIN_SEED, Epoch, Position
from chronik_repl.wal.changes import (
    Change,
    CommittedOffset,
    EpochStart,
    GroupChanged,
    GroupMember,
    GroupRemoved,
    Member,
    MembersChanged,
    OffsetsCommitted,
    ProducerIdGiven,
    SourcePosition,
    TopicMade,
    TopicRemoved,
)
from chronik_repl.wal.frame import BadFrame, decode, encode, topic_prefix
from chronik_repl.wal.log import Log, LogSettings
from chronik_repl.wal.segment import FRAMES_AT
from tests.simulation.disk import SimDisk
from tests.simulation.medium import Medium
from tests.wal.workbench import batch

VECTORS = Path(__file__).parent / "vectors"
Json = dict[str, Any]

CHANGES: list[Change] = [
    MembersChanged((Member(1, "dir-1", "h1:9291", "h1:9092", "h1:9644", "rack-a"), Member(2, "dir-2")), 1),
    TopicMade("orders", 2, {"cleanup.policy": "delete"}),
    TopicMade("gone", 1),
    TopicRemoved("gone"),
    ProducerIdGiven(7),
    SourcePosition("shop", 123456789, 2, {"slot": "chronik"}),
    GroupChanged("readers", 3, "consumer", "range", "m1", (GroupMember("m1", protocols=(("range", b"\1"),)),)),
    OffsetsCommitted("readers", (CommittedOffset("orders", 0, 4, 1, "note"),)),
    GroupChanged("short", 1),
    GroupRemoved("short"),
]


# A reader from the page: nothing of chronik_repl below, but for msgpack by its library.


def crc32c_by_table(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def page_frame(data: bytes, at: int, position: int, previous: int) -> Json | None:
    """None where there is no good frame."""
    if len(data) - at < 8:
        return None
    magic, version, length = struct.unpack_from(">HHI", data, at)
    size = 8 + length
    if (magic, version) != (0x5741, 2) or length < 48 or size > 16 * 1024 * 1024 or len(data) - at < size:
        return None
    (topic_len,) = struct.unpack_from(">H", data, at + 8)
    if topic_len > 249 or 56 + topic_len > size:
        return None
    rest = at + 10 + topic_len
    fields = struct.unpack_from(">iqIqHIQII", data, rest)
    names = ("partition", "base_offset", "record_count", "timestamp_ms", "kind", "epoch", "position", "previous")
    checksum = fields[8]
    if crc32c_by_table(data[at : rest + 42] + data[rest + 46 : at + size]) != checksum:
        return None
    frame: Json = dict(zip(names, fields, strict=False))
    if (frame["position"], frame["previous"]) != (position, previous) or frame["kind"] > 4:
        return None
    payload = data[rest + 46 : at + size]
    frame |= {"topic": data[at + 10 : rest].decode(), "checksum": checksum, "size": size, "data": payload.hex()}
    if frame["kind"]:
        frame["change"] = plain(msgspec.msgpack.decode(payload))
    return frame


def plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bin": value.hex()}
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def page_segment(data: bytes) -> Json:
    magic, form, start, chain, cluster, log_start, crc = struct.unpack_from(">8sIQI64sQI", data)
    assert magic == b"CHRONIK\0"
    assert crc == crc32c_by_table(data[:96])
    marks = []
    for slot in (4096, 8192):
        magic, sequence, durable_end, high_watermark, crc = struct.unpack_from(">HQQQI", data, slot)
        if magic == 0x4D4B and crc == crc32c_by_table(data[slot : slot + 26]):
            assert slot == 4096 * (1 + sequence % 2)
            marks.append({"sequence": sequence, "durable_end": durable_end, "high_watermark": high_watermark})
    frames = []
    at, position, previous = 12288, start, chain
    while (frame := page_frame(data, at, position, previous)) is not None:
        frames.append(frame)
        at, position, previous = at + frame["size"], position + frame["size"], frame["checksum"]
    return {
        "format": form, "start": start, "chain": chain, "cluster_id": cluster.rstrip(b"\0").decode(),
        "log_start": log_start, "mark": max(marks, key=lambda mark: mark["sequence"]), "end": position,
        "frames": frames,
    }  # fmt: skip


def page_index(data: bytes) -> Json:
    magic, form, start, end, chain, partitions, entries, landmarks, names, crc, own = struct.unpack_from(
        ">8sIQQIIIIIII", data
    )
    assert (magic, form) == (b"CHRONIDX", 1)
    assert crc == crc32c_by_table(data[56:])
    assert own == crc32c_by_table(data[:52])
    table = data[56 : 56 + 36 * partitions]
    rows = data[56 + 36 * partitions :][: 32 * entries]
    marks = data[56 + 36 * partitions + 32 * entries :][: 8 * landmarks]
    text = data[len(data) - names :]
    answer: Json = {"start": start, "end": end, "chain": chain, "landmarks": [], "partitions": []}
    answer["landmarks"] = [list(one) for one in struct.iter_unpack(">II", marks)]
    for at, length, _, partition, first, count, next_offset, newest in struct.iter_unpack(">IHHiIIqq", table):
        mine = list(struct.iter_unpack(">qqIIII", rows[32 * first : 32 * (first + count)]))
        answer["partitions"].append(
            {
                "topic": text[at : at + length].decode(),
                "partition": partition,
                "next_offset": next_offset,
                "max_timestamp": newest,
                "entries": [list(entry[:5]) for entry in mine],
            }
        )
    return answer


# Making them.


def make_log() -> dict[str, bytes]:
    """A log of two segments with a bit of everything, the same every time."""
    medium = Medium()

    async def main() -> None:
        disk = SimDisk(random.Random(0), medium)
        start_ms = 1_700_000_000_000
        now = iter(range(start_ms, 1_800_000_000_000, 1000))  # one a frame
        settings = LogSettings(segment_bytes=4096, min_free_bytes=0, scrub_mb_per_s=0)
        log = await Log.open(disk, settings, None, clock_ms=lambda: start_ms)
        log._writer._clock_ms = lambda: next(now)
        async with trio.open_nursery() as nursery:
            await nursery.start(log.run)
            log.found("vectors")
            log.begin_epoch(Epoch(1), EpochStart(1, "dir-1"))
            for change in CHANGES:
                log.append_change(change)
            for number in range(14):
                sent = batch(3, 150, fill=97 + number, producer=(7, 0, 3 * number), newest=1_699_999_999_000 + number)
                log.append_batch("orders", number % 2, sent, record_count=3)
            await log.durable.wait(log.end)
            log.commit_to(log.end)
            await trio.sleep(1)  # sealed, marked
            nursery.cancel_scope.cancel()
        await log.close()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    files = {name: data for name, data in medium.image().items() if name.endswith((".wal", ".idx"))}
    # The padding after the frames says nothing: leave a little of it, for zeros are no frame.
    last = max(name for name in files if name.endswith(".wal"))
    files[last] = files[last].rstrip(b"\0") + bytes(64)
    return files


def make_frames() -> list[Json]:
    """Single frames, each with where it is expected to stand; `good` says whether it does."""

    def data_frame(position: int = 100, previous: int = 9, topic: str = "t", kind: int = 0) -> bytearray:
        sent = (5).to_bytes(8, "big") + batch(2, 10)[8:]
        return bytearray(encode(topic_prefix(topic), 5, 2, 1000, kind, 3, position, previous, 1, (sent,))[0])

    def changed(at: int, value: int) -> bytes:
        raw = data_frame()
        raw[at] = value
        return bytes(raw)

    cases: list[tuple[str, bytes]] = [
        ("good", bytes(data_frame())),
        ("longest topic", bytes(data_frame(topic="x" * 249))),
        ("no topic, no data", encode(topic_prefix(""), 0, 0, 0, 0, 0, 100, 9, -1, ())[0]),
        ("another position", bytes(data_frame(position=101))),
        ("another chain", bytes(data_frame(previous=8))),
        ("unknown kind", bytes(data_frame(kind=5))),
        ("another magic", changed(0, 0x58)),
        ("another version", changed(3, 3)),
        ("a length that is too small", changed(7, 40)),
        ("a length that is too large", changed(4, 0xFF)),
        ("a topic longer than the frame", changed(9, 240)),
        ("a changed offset", changed(20, 1)),
        ("a changed checksum", changed(54, 1)),
        ("a changed last byte", changed(len(data_frame()) - 1, 1)),
        ("cut off", bytes(data_frame())[:-1]),
        ("zeros", bytes(100)),
        ("nothing", b""),
    ]
    made = []
    for name, raw in cases:
        frame = page_frame(raw, 0, 100, 9)
        case = {"name": name, "expected_position": 100, "expected_previous": 9, "hex": raw.hex(), "good": bool(frame)}
        made.append(case | ({"frame": frame} if frame else {}))
    return made


def make() -> dict[str, bytes]:
    files = {name.removeprefix("wal/"): data for name, data in make_log().items()}
    described = {
        name: page_segment(data) if name.endswith(".wal") else page_index(data) for name, data in sorted(files.items())
    }
    files["log.json"] = (json.dumps(described, indent=1) + "\n").encode()
    files["frames.json"] = (json.dumps(make_frames(), indent=1) + "\n").encode()
    return files


# The tests.


def stored() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(VECTORS.iterdir())}


def test_the_format_has_not_changed() -> None:
    assert stored() == make()


def test_the_page_is_enough_to_read_a_log() -> None:
    files = stored()
    described = json.loads(files["log.json"])
    segments = sorted(name for name in files if name.endswith(".wal"))
    assert len(segments) == 2
    for name, data in files.items():
        if name.endswith(".wal"):
            assert page_segment(data) == described[name]
        elif name.endswith(".idx"):
            assert page_index(data) == described[name]
    first, second = (described[name] for name in segments)
    assert first["end"] == second["start"]
    assert first["frames"][-1]["checksum"] == second["chain"]
    assert second["mark"]["durable_end"] == second["end"] == second["mark"]["high_watermark"]
    frames = first["frames"] + second["frames"]
    kinds = {frame["change"]["type"] for frame in frames if frame["kind"]}
    assert kinds == {
        "epoch-start", "snapshot", "source", "members", "topic", "topic-removed", "producer-id", "group",
        "group-removed", "offsets",
    }  # fmt: skip
    batches = [frame for frame in frames if frame["kind"] == 0]
    index = page_index(files[segments[0].replace(".wal", ".idx")])
    listed = [entry for partition in index["partitions"] for entry in partition["entries"]]
    in_first = [frame for frame in first["frames"] if frame["kind"] == 0]
    assert sorted(entry[2] for entry in listed) == [frame["position"] for frame in in_first]
    for partition in (0, 1):
        offsets = [frame["base_offset"] for frame in batches if frame["partition"] == partition]
        assert offsets == list(range(0, 21, 3))


def test_a_snapshot_can_be_read_from_the_page() -> None:
    described = json.loads(stored()["log.json"])
    second = described[max(name for name in described if name.endswith(".wal"))]
    part = second["frames"][0]["change"]
    assert (part["part"], part["parts"]) == (0, 1)
    form, log_start, _, next_producer_id, history, membership, topics, groups, sources = msgspec.msgpack.decode(
        bytes.fromhex(part["piece"]["bin"])
    )
    assert (form, log_start, next_producer_id) == (1, 0, 8)
    first = described[min(name for name in described if name.endswith(".wal"))]
    start = first["frames"][1]
    assert history == [[1, 1, start["position"], start["previous"], False]]
    assert membership[0][1]["members"][1][:2] == [2, "dir-2"]
    assert {topic[0]: topic[1] for topic in topics} == {"orders": False, "gone": True}
    assert [group[0] for group in groups] == ["readers"]
    assert sources[0]["lsn"] == 123456789
    here = [frame for frame in first["frames"] if frame["kind"] == 0]
    orders = next(topic for topic in topics if topic[0] == "orders")
    assert [partition[1] for partition in orders[3]] == [
        3 * sum(frame["partition"] == number for frame in here) for number in (0, 1)
    ]


def test_our_own_decoder_agrees_on_every_frame() -> None:
    for case in json.loads(stored()["frames.json"]):
        raw = bytes.fromhex(case["hex"])
        try:
            frame = decode(memoryview(raw), 0, case["expected_position"], case["expected_previous"])
        except BadFrame:
            frame = None
        assert (frame is not None) == case["good"], case["name"]
        if frame is not None:
            ours = frame._asdict() | {"topic": frame.topic.decode(), "data": bytes(frame.data).hex()}
            assert ours == case["frame"], case["name"]


async def test_the_log_opens_the_vectors() -> None:
    medium = Medium()
    medium.make_folder("wal")
    files = stored()
    for name, data in files.items():
        if not name.endswith(".json"):
            inode = medium.create(f"wal/{name}")
            medium.write(inode, 0, data)
            medium.sync(inode)
    medium.sync_dir("wal")
    log = await Log.open(SimDisk(random.Random(0), medium), LogSettings(min_free_bytes=0), None)
    described = json.loads(files["log.json"])
    last = described[max(name for name in described if name.endswith(".wal"))]
    assert (log.start, log.end, log.cluster_id) == (0, last["end"], "vectors")
    assert log.committed.value == last["end"]
    frames = [frame for name in sorted(described) for frame in described[name].get("frames", [])]
    for frame in frames:
        if frame["kind"] == 0:
            fetched = await log.fetch(frame["topic"], frame["partition"], frame["base_offset"], 1)
            assert bytes(fetched.batches[0]).hex() == frame["data"]
        assert await log.checksum_at(Position(frame["position"])) == frame["previous"]
    await log.close()


def test_the_crc_of_the_page() -> None:
    assert crc32c_by_table(b"123456789") == 0xE3069283
    assert CHAIN_SEED == 0
    assert FRAMES_AT == 12288


if __name__ == "__main__":
    VECTORS.mkdir(exist_ok=True)
    for name, data in make().items():
        (VECTORS / name).write_bytes(data)
