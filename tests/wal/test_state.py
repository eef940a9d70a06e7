"""The fold and its snapshot."""

from __future__ import annotations

import random

import pytest

from chronik_repl.positions import Checksum, Epoch, Offset, Position
from chronik_repl.wal.changes import (
    Change,
    CommittedOffset,
    EpochStart,
    GroupChanged,
    GroupMember,
    GroupRemoved,
    HistoryEntry,
    LogStartMoved,
    Member,
    MembersChanged,
    OffsetsCommitted,
    ProducerIdGiven,
    SnapshotPart,
    SourcePosition,
    TopicMade,
    TopicRemoved,
    encode_change,
)
from chronik_repl.wal.frame import BadFrame, Frame, decode, encode, topic_prefix
from chronik_repl.wal.snapshot import PART_BYTES, split
from chronik_repl.wal.state import GROUP_IDLE_MS, PRODUCER_IDLE_MS, State, kind_of
from tests.wal.workbench import batch


class Tape:
    """Frames one after another, folded into a state as they are made."""

    def __init__(self) -> None:
        self.state = State()
        self.end, self.chain, self.epoch, self.now_ms = 0, 0, 1, 1000
        self.frames: list[bytes] = []

    def _fold(self, raw: bytes, checksum: int) -> None:
        frame = decode(memoryview(raw), 0, self.end, self.chain)
        assert frame is not None
        self.state.apply(frame)
        self.frames.append(raw)
        self.end, self.chain = self.end + len(raw), checksum

    def change(self, change: Change, *, kind: int | None = None) -> None:
        kind = kind_of(change) if kind is None else kind
        data = encode_change(change)
        self._fold(*encode(topic_prefix(""), 0, 0, self.now_ms, kind, self.epoch, self.end, self.chain, -1, (data,)))

    def batch(
        self, topic: str, partition: int, records: int, producer: tuple[int, int, int] = (-1, -1, -1), base: int = -1
    ) -> None:
        known = self.state.find(topic, partition)
        base = base if base >= 0 else known.next_offset if known else 0
        data = base.to_bytes(8, "big") + batch(records, producer=producer)[8:]
        head = (topic_prefix(topic), base, records, self.now_ms, 0, self.epoch, self.end, self.chain, partition)
        self._fold(*encode(*head, (data,)))


def busy_tape(seed: int = 1) -> Tape:
    """A bit of everything."""
    rng = random.Random(seed)
    tape = Tape()
    tape.change(EpochStart(1, "dir", accept_loss=True))
    tape.change(MembersChanged((Member(1, "a", "h:1"), Member(2, "b")), 1))
    for number in range(5):
        tape.change(TopicMade(f"topic-{number}", 3, {"cleanup.policy": "delete"} if number == 2 else {}))
    for _ in range(200):
        tape.now_ms += rng.randrange(100)
        match rng.randrange(8):
            case 0:
                tape.change(ProducerIdGiven(rng.randrange(50)))
            case 1:
                offsets = tuple(CommittedOffset("topic-1", p, rng.randrange(-1, 9), 1, "m") for p in range(3))
                tape.change(OffsetsCommitted(f"group-{rng.randrange(3)}", offsets))
            case 2:
                members = tuple(GroupMember(f"m{n}", protocols=(("range", b"x"),), assignment=b"a") for n in range(2))
                tape.change(GroupChanged(f"group-{rng.randrange(3)}", rng.randrange(9), leader="m0", members=members))
            case 3:
                tape.change(SourcePosition("pg", rng.randrange(99), 1, {"slot": "s"}))
            case _:
                producer = (rng.randrange(3), 0, rng.randrange(2**31)) if rng.random() < 0.5 else (-1, -1, -1)
                tape.batch(f"topic-{rng.randrange(5)}", rng.randrange(3), rng.randrange(1, 9), producer)
    tape.change(TopicRemoved("topic-3"))
    tape.change(LogStartMoved(5000))
    tape.change(GroupRemoved("group-2"))
    return tape


def test_a_snapshot_is_the_state() -> None:
    tape = busy_tape()
    data = tape.state.snapshot()
    again = State.restore(data)
    assert again.snapshot() == data
    assert again.history == tape.state.history
    assert again.membership == tape.state.membership
    assert again.log_start == 5000
    assert {name: group.offsets for name, group in again.groups.items()} == {
        name: group.offsets for name, group in tape.state.groups.items()
    }


def test_the_fold_goes_on_from_a_snapshot_as_from_the_beginning() -> None:
    whole = busy_tape()
    for cut in range(0, len(whole.frames), 17):
        state, position, chain = State(), 0, 0
        for number, raw in enumerate(whole.frames):
            if number == cut:
                state = State.restore(state.snapshot())
            frame = decode(memoryview(raw), 0, position, chain)
            assert frame is not None
            state.apply(frame)
            position, chain = position + len(raw), frame.checksum
        assert state.snapshot() == whole.state.snapshot()


def test_a_snapshot_in_the_log_replaces_the_state_in_place() -> None:
    tape = busy_tape()
    partition = tape.state.topics["topic-1"].partitions[0]
    partition.committed_offset = Offset(3)
    before = tape.state.snapshot()
    for part in split(before):
        tape.change(part)
    assert tape.state.snapshot() == before
    assert tape.state.topics["topic-1"].partitions[0] is partition
    assert partition.committed_offset == 3


def test_parts_come_in_order_and_full() -> None:
    tape = Tape()
    full = b"\0" * PART_BYTES
    for wrong in (SnapshotPart(1, 2, full), SnapshotPart(0, 2, b"x"), SnapshotPart(0, 0, b""), SnapshotPart(3, 2, b"")):
        with pytest.raises(BadFrame):
            tape.change(wrong)
    tape.change(SnapshotPart(0, 3, full))
    with pytest.raises(BadFrame):
        tape.change(SnapshotPart(2, 3, b"x"))
    with pytest.raises(BadFrame, match="unreadable"):
        tape.change(SnapshotPart(0, 1, b"\xc1"))


def test_a_snapshot_cut_off_in_the_middle_never_counts() -> None:
    tape = busy_tape()
    before = tape.state.snapshot()
    tape.change(SnapshotPart(0, 2, b"\0" * PART_BYTES))
    assert tape.state.snapshot_pending
    assert tape.state.snapshot() == before
    tape.change(ProducerIdGiven(5_000_000))
    assert not tape.state.snapshot_pending
    with pytest.raises(BadFrame):
        tape.change(SnapshotPart(1, 2, b"rest"))
    assert tape.state.next_producer_id == 5_000_001


def test_what_cannot_stand_in_the_log() -> None:
    tape = Tape()
    tape.change(EpochStart(1, "d"))
    tape.change(TopicMade("t", 1))
    before = tape.state.snapshot()
    with pytest.raises(BadFrame, match="no such partition"):
        tape.batch("t", 1, 1)
    with pytest.raises(BadFrame, match="no such partition"):
        tape.batch("u", 0, 1)
    with pytest.raises(BadFrame, match="0 is next"):
        tape.batch("t", 0, 1, base=5)
    with pytest.raises(BadFrame, match="in a frame of kind"):
        tape.change(TopicMade("u", 1), kind=3)
    with pytest.raises(BadFrame, match="begins"):
        tape.change(EpochStart(1, "d"))
    for topic in ("", "a/b", "x" * 250):
        with pytest.raises(BadFrame, match="topic name"):
            tape.change(TopicMade(topic, 1))
    assert tape.state.snapshot() == before


def test_a_producers_last_five_batches() -> None:
    tape = Tape()
    tape.change(TopicMade("t", 1))
    for number in range(7):
        tape.batch("t", 0, 10, (4, 0, number * 10))
    producer = tape.state.topics["t"].partitions[0].producers[4]
    assert [(b.base_sequence, b.last_sequence, b.base_offset) for b in producer.batches] == [
        (n, n + 9, n) for n in range(20, 70, 10)
    ]
    assert producer.batches[-1].end_position == tape.end
    tape.batch("t", 0, 10, (4, 1, 0))
    producer = tape.state.topics["t"].partitions[0].producers[4]
    assert (producer.epoch, len(producer.batches)) == (1, 1)
    tape.batch("t", 0, 10, (4, 1, 2**31 - 4))
    assert producer.batches[-1].last_sequence == 5, "sequences wrap"


def test_idle_producers_and_empty_groups_expire_by_the_logs_time() -> None:
    tape = Tape()
    tape.change(TopicMade("t", 1))
    tape.batch("t", 0, 1, (1, 0, 0))
    tape.change(OffsetsCommitted("idle", (CommittedOffset("t", 0, 1),)))
    tape.change(GroupChanged("busy", 1, members=(GroupMember("m"),)))
    tape.now_ms += max(PRODUCER_IDLE_MS, GROUP_IDLE_MS)
    tape.batch("t", 0, 1, (2, 0, 0))
    tape.state.expire(tape.now_ms)
    assert set(tape.state.groups) == {"idle", "busy"}
    assert set(tape.state.topics["t"].partitions[0].producers) == {1, 2}
    tape.now_ms += 1
    tape.batch("t", 0, 1, (2, 0, 1))
    tape.state.expire(tape.now_ms)
    assert set(tape.state.groups) == {"busy"}
    assert set(tape.state.topics["t"].partitions[0].producers) == {2}


def test_kf60_a_producer_id_is_never_given_twice() -> None:
    tape = Tape()
    tape.change(ProducerIdGiven(7))
    tape.change(ProducerIdGiven(3))
    assert State.restore(tape.state.snapshot()).next_producer_id == 8


def test_kf60_ids_that_were_lost_are_not_given_out_again() -> None:
    tape = Tape()
    tape.change(ProducerIdGiven(7))
    tape.change(EpochStart(2, "dir", accept_loss=True))
    assert State.restore(tape.state.snapshot()).next_producer_id > 1_000_000


def test_history_says_where_an_epoch_began_and_after_what() -> None:
    tape = Tape()
    tape.change(TopicMade("t", 1))
    position, chain = tape.end, tape.chain
    tape.epoch = 9
    tape.change(EpochStart(3, "dir"))
    (entry,) = tape.state.history
    assert entry == HistoryEntry(Epoch(9), 3, Position(position), Checksum(chain), False)


def test_snapshots_that_lie_are_refused() -> None:
    data = busy_tape().state.snapshot()
    rng = random.Random(2)
    for _ in range(2000):
        bad = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            bad[rng.randrange(len(bad))] = rng.randrange(256)
        try:
            State.restore(bytes(bad))
        except BadFrame:
            continue


def test_an_unreadable_change_is_a_bad_frame() -> None:
    state = State()
    for data in (b"", b"\xc1", b"\x81\xa4type\xa1x", b"\x91" * 100_000, b"\xa2\xff\xfe"):
        raw, _ = encode(topic_prefix(""), 0, 0, 0, 4, 1, 0, 0, -1, (data,))
        frame = decode(memoryview(raw), 0, 0, 0)
        assert isinstance(frame, Frame)
        with pytest.raises(BadFrame):
            state.apply(frame)
