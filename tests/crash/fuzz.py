"""Mutated bytes for every parser of the log, with checksums fixed up so that they get past them. `scripts/fuzz --help`.

Each target has good inputs, a way to make a mutated one's checksums right again, and the errors that it declares.
Anything else that it raises is a bug; so is memory that grows with what the bytes claim instead of what they are.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from crc32c import crc32c

from chronik_repl.errors import CorruptLog, FormatTooNew, ProtocolError
from chronik_repl.positions import Checksum, Epoch, Offset, Position
from chronik_repl.wal import changes, frame, index, records, segment
from chronik_repl.wal.recovery import scan
from chronik_repl.wal.state import State, kind_of
from tests.crash.scenario import batch

INTERESTING = (0, 1, 2, 0x7F, 0x80, 0xFF)
FRAME_BYTES_MAX = 1 << 20


class Target(NamedTuple):
    seeds: list[bytes]
    fix: Callable[[bytearray], None]
    run: Callable[[bytes], object]
    declared: tuple[type[Exception], ...]


def mutate(rng: random.Random, data: bytes) -> bytearray:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        if not out:
            out += b"\0"
        at = int(rng.random() * len(out))
        kind = rng.getrandbits(3)
        if kind < 3:
            out[at] ^= 1 << rng.getrandbits(3)
        elif kind == 3:
            out[at] = INTERESTING[rng.getrandbits(8) % len(INTERESTING)]
        elif kind == 4:
            size = 1 << rng.getrandbits(2)
            out[at : at + size] = (b"\xff" if rng.getrandbits(1) else b"\0") * size
        elif kind == 5:
            del out[at : at + rng.choice((1, 2, 8, 64, len(out)))]
        elif kind == 6:
            out[at:at] = rng.randbytes(rng.choice((1, 2, 4, 16)))
        else:
            start = int(rng.random() * len(out))
            out[at:at] = out[start : start + rng.choice((1, 4, 8, 32))]
    return out


# The frame


def _frames() -> list[bytes]:
    out = []
    chain, position = Checksum(7), 1000
    data = batch(3, 40)
    change = changes.encode_change(changes.TopicMade("orders", 3, {"retention.ms": "1"}))
    for topic, kind, piece in (("orders", 0, data), ("", 4, change), ("", 2, b""), ("a" * 249, 0, data)):
        encoded, chain = frame.encode(
            frame.topic_prefix(topic), 5, 3, 1_700_000_000_000, kind, 2, position, chain, 1, (piece,)
        )
        position += len(encoded)
        out.append(encoded)
    return [out[0], b"".join(out)]


def _fix_frame(data: bytearray) -> None:
    """The first frame's checksum and, mostly, its length."""
    if len(data) < frame.OVERHEAD:
        return
    topic_len = int.from_bytes(data[8:10], "big")
    at = 10 + topic_len + frame.FIELDS.size
    size = 8 + int.from_bytes(data[4:8], "big")
    if not frame.OVERHEAD <= size <= len(data):
        if data[-1] & 3:
            return
        size = len(data)
        data[4:8] = (size - 8).to_bytes(4, "big")
    if at + 4 <= size:
        data[at : at + 4] = crc32c(data[at + 4 : size], crc32c(data[:at])).to_bytes(4, "big")


def _run_frame(data: bytes) -> None:
    view = memoryview(data)
    scan(view, Position(1000), Checksum(7), FRAME_BYTES_MAX, State().apply)
    found = frame.decode(view, 0, 1000, None, FRAME_BYTES_MAX)
    assert found is None or found.size <= len(data)


# The segment's blocks


def _blocks() -> list[bytes]:
    header = segment.encode_header(segment.Header(Position(5000), Checksum(9), "a-cluster", Position(100)))
    marks = [segment.encode_mark(segment.Mark(n, Position(6000), Position(5500))) for n in (3, 4)]
    return [header[:200], header[:128] + marks[0] + marks[1]]


def _fix_header(data: bytearray) -> None:
    at = segment.HEADER.size
    if len(data) >= at + 4:
        data[at : at + 4] = crc32c(data[:at]).to_bytes(4, "big")
    for start in (128, 128 + segment.MARK.size + 4):
        end = start + segment.MARK.size
        if len(data) >= end + 4:
            data[end : end + 4] = crc32c(data[start:end]).to_bytes(4, "big")


def _run_header(data: bytes) -> None:
    rest = data[128:].ljust(2 * segment.BLOCK, b"\0")
    segment.best_mark(bytes(segment.BLOCK) + rest)
    segment.decode_mark(data[128:])
    segment.decode_header(data, "a file")


# The index


def _indexes() -> list[bytes]:
    made = index.ActiveIndex(Position(5000), Checksum(9))
    position = 5000
    for n in range(40):
        made.add(("orders", n % 3), n * 3, 1_700_000_000_000 + n, position, 3000, 3)
        position += 3000
        made.ends.append(position)
        made.checksums.append(n)
    made.close({("orders", 0): 117, ("orders", 1): 120, ("orders", 2): 120, ("quiet", 0): 4}.items())
    return [made.encode()]


def _fix_index(data: bytearray) -> None:
    if len(data) >= index.HEADER_BYTES:
        at = index.HEADER.size
        data[at - 4 : at] = crc32c(data[index.HEADER_BYTES :]).to_bytes(4, "big")
        data[at : at + 4] = crc32c(data[:at]).to_bytes(4, "big")


def _run_index(data: bytes) -> None:
    start, end = (int.from_bytes(data[at : at + 8], "big") for at in (12, 20))
    found = index.SealedIndex(data, Position(start), Position(end))
    for topic, partition in (("orders", 0), ("orders", 2), ("quiet", 0), ("nobody", 1)):
        found.next_offset(topic, partition)
        for number, entry in enumerate(found.entries(topic, partition, 9)):
            assert entry.size >= 0
            if number > 100_000:
                raise AssertionError("more entries than bytes")
    found.landmark(70_000)


# Changes, snapshots, batches


def _changes() -> list[bytes]:
    member = changes.GroupMember("m", "c", "h", "", 1, 2, (("range", b"\0\1"),), b"\2")
    return [
        changes.encode_change(change)
        for change in (
            changes.EpochStart(1, "directory", True),
            changes.SnapshotPart(0, 1, _state().snapshot()),
            changes.SourcePosition("pg", 123, 4, {"a": "b"}),
            changes.MembersChanged((changes.Member(1, "d", "h:1", "h:2", "h:3", "r"),), 1),
            changes.TopicMade("orders", 3, {"a": "b"}),
            changes.TopicRemoved("orders"),
            changes.LogStartMoved(77),
            changes.ProducerIdGiven(5),
            changes.GroupChanged("g", 3, "consumer", "range", "m", (member,)),
            changes.GroupRemoved("g"),
            changes.OffsetsCommitted("g", (changes.CommittedOffset("orders", 1, 5, 2, "x"),)),
        )
    ]


def _state() -> State:
    state = State()
    position = Position(0)
    for change in (
        changes.TopicMade("orders", 3),
        changes.TopicMade("gone", 1),
        changes.TopicRemoved("gone"),
        changes.EpochStart(1, "directory"),
        changes.MembersChanged((changes.Member(1, "directory"),), 0),
        changes.GroupChanged("g", 1, members=(changes.GroupMember("m"),), leader="m"),
        changes.OffsetsCommitted("g", (changes.CommittedOffset("orders", 1, 5),)),
        changes.SourcePosition("pg", 123),
    ):
        state.fold(change, position, Position(position + 1), Epoch(1), Checksum(0))
        position = Position(position + 1)
    state.topics["orders"].partitions[1].produced(5, 0, 0, (Offset(0), Position(9), 3), 1)
    return state


def _run_change(data: bytes) -> None:
    change = changes.decode_change(data)
    state = _STATE
    state.check(change, kind_of(change))
    state.fold(change, Position(1), Position(2), Epoch(1), Checksum(0))
    if sum(len(topic.partitions) for topic in state.topics.values()) > 200_000 or len(state.history) > 1000:
        _STATE.__init__()  # type: ignore[misc]


def _run_snapshot(data: bytes) -> None:
    State.restore(data).snapshot()


def _fix_batch(data: bytearray) -> None:
    if len(data) >= records.BATCH.size:
        data[8:12] = (len(data) - 12).to_bytes(4, "big")
        data[16] = 2
        data[17:21] = crc32c(data[21:]).to_bytes(4, "big")


def _batches() -> list[bytes]:
    from tests.wal.test_records import make_batch

    return [make_batch(compression) for compression in records.COMPRESSIONS]


def _nothing(data: bytearray) -> None: ...


_STATE = State()


def targets() -> dict[str, Target]:
    return {
        "frame": Target(_frames(), _fix_frame, _run_frame, (frame.BadFrame,)),
        "header": Target(_blocks(), _fix_header, _run_header, (CorruptLog, FormatTooNew)),
        "index": Target(_indexes(), _fix_index, _run_index, (index.BadIndex,)),
        "change": Target(_changes(), _nothing, _run_change, (ProtocolError,)),
        "snapshot": Target([_state().snapshot()], _nothing, _run_snapshot, (ProtocolError,)),
        "batch": Target(_batches(), _fix_batch, lambda d: list(records.read_records(d, 1 << 20)), (records.BadBatch,)),
    }


class Found(NamedTuple):
    inputs: int
    accepted: int
    refused: int
    grown_mb: float


def fuzz(name: str, count: int, seed: int) -> Found:
    """Raises what the parser raised, with the input in a note, if it is none of its declared errors."""
    target = targets()[name]
    rng = random.Random(seed)
    accepted = refused = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for data in _inputs(target, rng, count):
        try:
            target.run(data)
            accepted += 1
        except target.declared:
            refused += 1
        except BaseException as error:
            error.add_note(f"{name}, seed {seed}: bytes.fromhex({data.hex()!r})")
            raise
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return Found(count, accepted, refused, grown)


def _inputs(target: Target, rng: random.Random, count: int) -> Iterator[bytes]:
    pool = list(target.seeds)
    for _ in range(count):
        data = mutate(rng, pool[int(rng.random() * len(pool))])
        if rng.getrandbits(4):  # now and then the checksum stays wrong
            target.fix(data)
        if len(data) < 4096 and not rng.getrandbits(7):  # go on from here: mutations of mutations
            pool[len(target.seeds) :] = [*pool[len(target.seeds) :][-200:], bytes(data)]
        yield bytes(data)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description="Mutated bytes for every parser of the log.")
    parser.add_argument("parsers", nargs="*", default=[], help=f"of: {' '.join(targets())} (all)")
    parser.add_argument("--inputs", type=float, default=1e7, help="for each parser (1e7)")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    for name in options.parsers or targets():
        began = time.monotonic()
        total, step = int(options.inputs), 100_000
        for number, done in enumerate(range(0, total, step)):
            found = fuzz(name, min(step, total - done), options.seed + number)
            if sys.stdout.isatty():
                print(f"\r{name}: {done + found.inputs} of {total}, grown {found.grown_mb:.0f} MB", end="", flush=True)
        took = time.monotonic() - began
        print(f"{name}: {total} inputs in {took:.0f} s from seed {options.seed}: declared errors only")
    return 0


if __name__ == "__main__":
    sys.exit(main())
