"""The closer look by itself, without Spark: every byte flipped, every cut, every frame taken out, doubled or moved."""

from __future__ import annotations

import struct
from itertools import combinations
from pathlib import Path

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from chronik_repl.spark.closer import Closer, CloserTask, Group, look_closer
from chronik_repl.spark.compare import WINDOW_PIECES, Difference
from chronik_repl.spark.digest import ScanTask, scan
from chronik_repl.spark.storage import Content
from chronik_repl.wal.segment import FRAMES_AT
from tests.spark import plants
from tests.spark.logs import Writer, Written, batch

FRAMES = 9


class Log:
    """One small segment: its frames and its stream."""

    def __init__(self, folder: Path, frames: int = FRAMES) -> None:
        writer = Writer(folder, keep=True)
        for number in range(frames):
            raw = batch([(b"key", b"value %d" % number * (1 + number % 3), [])] * (1 + number % 2))
            writer.data(f"t{number % 2}", 0, raw, 1 + number % 2)
        writer.close()
        self.frames = writer.written
        self.stream = b"".join(f.raw for f in self.frames)
        self.end = len(self.stream)

    def look(self, other: bytes, *, sealed: bool = True) -> Closer:
        """Two good copies and one with these bytes."""
        good = Content(bytes(FRAMES_AT) + self.stream)
        bad = Content(bytes(FRAMES_AT) + other)
        groups = (
            Group(("b",), "b", self.end, sealed, self.end),
            Group(("a", "c"), "a", self.end, sealed, self.end),
        )
        return look_closer(CloserTask(0, self.end, groups), [bad, good])

    def one(self, other: bytes, *, sealed: bool = True) -> Difference:
        looked = self.look(other, sealed=sealed)
        assert looked.reference == ("a", "c")
        assert [d.copy for d in looked.differences] == ["b"], looked.differences
        return looked.differences[0]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    return Log(tmp_path_factory.mktemp("closer"))


def said(difference: Difference) -> tuple[str, int, int]:
    return difference.kind, difference.start, difference.end


def test_equal_bytes_are_no_difference(log: Log) -> None:
    assert log.look(log.stream).differences == []


@pytest.mark.parametrize("sealed", [True, False])
def test_every_byte_flipped(log: Log, sealed: bool) -> None:
    for frame in log.frames:
        for at in range(frame.position, frame.end):
            other = bytearray(log.stream)
            other[at] ^= 0x10
            found = log.one(bytes(other), sealed=sealed)
            assert said(found) == ("damaged", frame.position, frame.end), at
            assert found.ranges == (plants.records(frame) if frame.topic else ())


def test_every_cut_is_missing_from_the_frame_it_falls_into(log: Log) -> None:
    for at in range(log.end):
        frame = next(f for f in log.frames if f.position <= at < f.end)
        for zeros in (b"", bytes(log.end - at)):
            other = log.stream[:at] + zeros
            if other == log.stream:
                continue
            if zeros:  # a frame's own last byte may be a zero
                first = next(i for i in range(at, log.end) if other[i] != log.stream[i])
                frame = next(f for f in log.frames if f.position <= first < f.end)
            found = log.look(other, sealed=False).differences
            assert {d.copy for d in found} == {"b"}
            assert found[0].start == frame.position
            assert found[-1].end == log.end
            assert {d.kind for d in found} <= {"missing", "damaged"}
            if not zeros:
                assert {d.kind for d in found} == {"missing"}
                assert "durable mark" in found[0].detail


def test_every_frame_taken_out(log: Log) -> None:
    for frame in log.frames:
        other = log.stream[: frame.position] + log.stream[frame.end :]
        found = log.one(other)
        assert said(found) == ("missing", frame.position, frame.end)


def test_every_frame_doubled_anywhere(log: Log) -> None:
    for frame in log.frames:
        for place in [f.position for f in log.frames] + [log.end]:
            found = log.one(log.stream[:place] + frame.raw + log.stream[place:])
            at = place if place != frame.position else frame.end  # before itself or after itself is the same
            assert said(found) == ("duplicated", at, at + len(frame.raw)), (frame.position, place)


def test_every_pair_swapped(log: Log) -> None:
    for one, two in combinations(range(len(log.frames)), 2):
        frames = list(log.frames)
        frames[one], frames[two] = frames[two], frames[one]
        looked = log.look(b"".join(f.raw for f in frames))
        assert {(d.copy, d.kind) for d in looked.differences} == {("b", "out of order")}, (one, two)
        if two == one + 1:
            (found,) = looked.differences
            assert said(found) == ("out of order", log.frames[one].position, log.frames[two].end)


def test_every_frame_changed_with_a_right_checksum(log: Log) -> None:
    for frame in log.frames:
        if frame.topic:
            other = bytearray(log.stream)
            other[frame.position : frame.end] = plants.again(frame, base=frame.base + 3)
            found = log.one(bytes(other))
            assert said(found) == ("changed", frame.position, frame.end)
            assert f"offset {frame.base + 3} where the others have {frame.base}" in found.detail


def rewritten(frames: list[Written], leave_out: int) -> bytes:
    """The log as someone would write it who never had that frame: all that follows is chained anew."""
    out, position, chain = b"", 0, 0
    for number, frame in enumerate(frames):
        if number != leave_out:
            raw = plants.again(frame, position=position, previous=chain)
            out += raw
            position += len(raw)
            (chain,) = struct.unpack_from(">I", raw, 8 + 2 + len(frame.topic) + 42)
    return out


def test_a_rewritten_history_is_one_missing_frame_and_what_follows_from_it(log: Log) -> None:
    for number in range(2, len(log.frames) - 1):
        looked = log.look(rewritten(log.frames, number))
        frame = log.frames[number]
        assert [said(d) for d in looked.differences] == [("missing", frame.position, frame.end)]
        assert looked.rechained["b"].frames == len(log.frames) - number - 1


EDIT = st.tuples(
    st.sampled_from(["cut", "double", "flip", "swap", "junk"]), st.integers(0, FRAMES), st.integers(0, 400)
)


@settings(max_examples=200, deadline=None)
@given(edits=st.lists(EDIT, min_size=1, max_size=6))
def test_any_mixture_is_blamed_on_the_right_copy_and_never_overlooked(
    log: Log, edits: list[tuple[str, int, int]]
) -> None:
    frames = [f.raw for f in log.frames]
    for what, number, at in edits:
        n = number % len(frames) if frames else 0
        if not frames:
            break
        if what == "cut":
            del frames[n]
        elif what == "double":
            frames.insert(n, frames[n])
        elif what == "swap":
            frames[n], frames[0] = frames[0], frames[n]
        elif what == "flip":
            raw = bytearray(frames[n])
            raw[at % len(raw)] ^= 1
            frames[n] = bytes(raw)
        else:
            frames.insert(n, bytes([at % 256]) * (1 + at))
    other = b"".join(frames)
    looked = log.look(other)
    assert {d.copy for d in looked.differences} == (set() if other == log.stream else {"b"})


def test_windows_of_a_long_segment_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chronik_repl.spark.compare.WINDOW_PIECES", 20)
    assert WINDOW_PIECES > 20
    log = Log(tmp_path / "long", 300)
    lost, twice, bad = log.frames[50], log.frames[151], log.frames[250]
    other = bytearray(log.stream)
    other[bad.end - 3] ^= 1
    other[twice.end : twice.end] = twice.raw
    del other[lost.position : lost.end]
    looked = log.look(bytes(other))
    shift = len(lost.raw)
    assert [said(d) for d in looked.differences] == [
        ("missing", lost.position, lost.end),
        ("duplicated", twice.end - shift, twice.end - shift + len(twice.raw)),
        ("damaged", bad.position, bad.end),
    ]


@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_the_strict_walk_survives_anything_and_lets_nothing_pass(log: Log, data: st.DataObject) -> None:
    """Bytes put in, taken out or overwritten anywhere, also with the frame's checksum made right again."""
    other = bytearray(log.stream)
    at = data.draw(st.integers(0, log.end - 1))
    junk = data.draw(st.binary(max_size=80))
    if data.draw(st.booleans()):
        other[at : at + len(junk)] = junk
    else:
        other[at:at] = junk
    if data.draw(st.booleans()):
        fix_checksums(other, log.frames)
    task = ScanTask("b", "", 0, (0, len(other)), True, None, None) if other else None
    if task is not None:
        seen = scan(task, Content(bytes(FRAMES_AT) + bytes(other)))
        assert (
            bytes(other) == log.stream
            or seen.wrong
            or seen.runs[-1].last_checksum != plants.checksum_of(log.frames[-1])
        )


def fix_checksums(stream: bytearray, frames: list[Written]) -> None:
    """Make the frames' own checksums fit whatever stands there now: the chain must still tell."""
    for frame in frames:
        data_at = frame.position + 8 + 2 + len(frame.topic) + 46
        if len(stream) >= frame.end:
            checksum = crc32c(bytes(stream[data_at : frame.end]), crc32c(bytes(stream[frame.position : data_at - 4])))
            stream[data_at - 4 : data_at] = struct.pack(">I", checksum)
