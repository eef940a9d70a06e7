"""The ring against a plain list: what comes out is what went in, in order, or the reader is told that it was lapped."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from chronik_repl.positions import Position
from chronik_repl.replication.ring import Lapped, Ring, Run


def _fill(ring: Ring, position: int, sizes: list[int]) -> int:
    for size in sizes:
        ring.push(Position(position), bytes([position % 251]) * size, 1)
        position += size
    return position


def test_takes_what_was_pushed_as_one_run() -> None:
    ring = Ring(8, 1000, Position(100))
    assert ring.join(Position(100))
    assert ring.take(1000) is None
    _fill(ring, 100, [10, 20, 30])
    run = ring.take(1000)
    assert isinstance(run, Run)
    assert (run.position, run.end, len(run.frames), run.records) == (100, 160, 3, 3)
    assert b"".join(run.frames) == bytes([100]) * 10 + bytes([110]) * 20 + bytes([130]) * 30
    assert ring.take(1000) is None
    assert ring.held_bytes == 0


def test_a_run_ends_before_the_limit_but_holds_at_least_one_frame() -> None:
    ring = Ring(8, 1000, Position(0))
    ring.join(Position(0))
    _fill(ring, 0, [10, 10, 300, 10])
    sizes = []
    while isinstance(run := ring.take(25), Run):
        sizes.append(sum(map(len, run.frames)))
    assert sizes == [20, 300, 10]


def test_kf24_a_full_ring_laps_its_reader_and_says_so() -> None:
    ring = Ring(4, 1000, Position(0))
    ring.join(Position(0))
    _fill(ring, 0, [10] * 5)
    assert isinstance(ring.take(1000), Lapped)
    assert ring.laps == 1
    assert ring.dropped_frames == 1
    assert not ring.attached
    assert not ring.join(Position(0))  # only in the files now
    assert ring.join(Position(10))
    run = ring.take(1000)
    assert isinstance(run, Run)
    assert (run.position, run.end) == (10, 50)


def test_bounded_by_bytes_too() -> None:
    ring = Ring(1000, 100, Position(0))
    _fill(ring, 0, [30] * 50)
    assert ring.held_bytes <= 100
    assert ring.frames == 3


def test_a_frame_larger_than_the_ring_passes_it_by() -> None:
    ring = Ring(10, 100, Position(0))
    ring.join(Position(0))
    end = _fill(ring, 0, [10, 500])
    assert isinstance(ring.take(1000), Lapped)
    assert ring.join(Position(end))
    _fill(ring, end, [20])
    run = ring.take(1000)
    assert isinstance(run, Run)
    assert run.position == end


def test_joins_only_where_a_frame_starts() -> None:
    ring = Ring(10, 1000, Position(0))
    _fill(ring, 0, [10, 10, 10])
    assert [at for at in range(40) if ring.join(Position(at))] == [0, 10, 20, 30]


@given(
    frames_max=st.integers(1, 6),
    bytes_max=st.integers(1, 60),
    steps=st.lists(st.one_of(st.integers(1, 30), st.sampled_from(["take", "take small", "detach"])), max_size=60),
)
def test_no_gap_and_no_duplicate_whatever_the_pace(frames_max: int, bytes_max: int, steps: list[int | str]) -> None:
    """The reader of this test catches up from a list, as a shipper does from the files."""
    ring = Ring(frames_max, bytes_max, Position(0))
    log = b""
    starts = [0]
    got = b""
    for step in steps:
        if isinstance(step, int):
            frame = bytes([len(starts) % 251]) * step
            ring.push(Position(len(log)), frame, 1)
            log += frame
            starts.append(len(log))
        elif step == "detach":
            ring.detach()
        else:
            if not ring.attached and not ring.join(Position(len(got))):
                following = starts[starts.index(len(got)) + 1]
                got = log[:following]  # one frame from the files
                continue
            run = ring.take(20 if step == "take small" else 10**6)
            if isinstance(run, Run):
                assert run.position == len(got)
                got += b"".join(run.frames)
                assert run.end == len(got)
        assert ring.held_bytes <= bytes_max
        assert 0 <= ring.frames <= frames_max
    assert log.startswith(got)
    assert len(got) in starts


def test_a_push_is_cheap() -> None:
    ring = Ring(100_000, 64 * 1024 * 1024, Position(0))
    frame = b"x" * 1024
    best_s = 1.0
    position = 0
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(20_000):
            ring.push(Position(position), frame, 1)
            position += 1024
        best_s = min(best_s, (time.perf_counter() - began) / 20_000)
    assert best_s < 10e-6  # 0.5 to 1 µs on a quiet machine
