"""The log against the bare machine: throughput, latency, CPU, batching, recovery, random reads.

Each ratio comes from rounds in which the log and the bare loop (bare_wal.c) take turns on the same disk, each being the
first in every other round; the median round counts, because a disk that is shared has its moods.
"""

from __future__ import annotations

import os
import random
import statistics
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import trio
from crc32c import crc32c
from report import Report, arguments, compile_c, is_filled, scratch_folder

from chronik_repl.positions import Epoch, Position
from chronik_repl.wal.changes import EpochStart, TopicMade
from chronik_repl.wal.committer import SPARE
from chronik_repl.wal.disk import RealDisk
from chronik_repl.wal.log import Log
from chronik_repl.wal.segment import FRAMES_AT
from chronik_repl.wal.values import LogSettings

MiB = 1024 * 1024
BATCH = struct.Struct(">qiibIhiqqqhii")


def make_batch(size: int) -> bytes:
    """One record batch (v2) of `size` bytes in all."""
    body = random.Random(size).randbytes(size - BATCH.size)
    tail = BATCH.pack(0, 0, 0, 0, 0, 0, 0, 1_000, 2_000, -1, -1, -1, 1)[21:] + body
    return BATCH.pack(0, len(tail) + 9, 0, 2, crc32c(tail), 0, 0, 0, 0, 0, 0, 0, 0)[:21] + tail


@asynccontextmanager
async def leading(folder: Path, settings: LogSettings) -> AsyncIterator[Log]:
    disk = RealDisk(folder)
    log = await Log.open(disk, settings, "bench")
    async with trio.open_nursery() as nursery:
        await nursery.start(log.run)
        log.found("bench")
        log.begin_epoch(Epoch(1), EpochStart(1, "directory"))
        log.append_change(TopicMade("t", 8))
        await log.durable.wait(log.end)
        yield log
        nursery.cancel_scope.cancel()
    disk.close()


class Throughput(NamedTuple):
    mb_per_s: float
    group_bytes: float


async def log_throughput(
    folder: Path, group_bytes: int, segment_bytes: int, segments: int, frame_bytes: int = 16 * 1024
) -> Throughput:
    """Always one group with the device, one behind it and one in the making."""
    batch = make_batch(frame_bytes)
    settings = LogSettings(segment_bytes=segment_bytes, scrub_mb_per_s=0)
    async with leading(folder, settings) as log:
        stop = segment_bytes
        while log.end < stop:  # the first segment is not made ahead of need: leave it behind
            for _ in range(max(1, 1 * MiB // frame_bytes)):
                log.append_batch("t", 0, batch, record_count=1)
            await log.durable.wait(log.end)
        start, groups = log.end, log.stats.groups_committed
        goal = start + segments * segment_bytes

        waiting: deque[Position] = deque()
        began = time.perf_counter()
        while log.end < goal:
            for _ in range(group_bytes // frame_bytes):
                appended = log.append_batch("t", 0, batch, record_count=1)
            waiting.append(appended.end)
            if len(waiting) < 3 or log.durable.value >= waiting[0]:
                await trio.lowlevel.checkpoint()  # let the committer take it: the next one is another group
            if len(waiting) == 3:
                await log.durable.wait(waiting.popleft())
                log.commit_to(log.durable.value)
        await log.durable.wait(log.end)
        seconds = time.perf_counter() - began
        moved = log.end - start
        return Throughput(moved / 1e6 / seconds, moved / (log.stats.groups_committed - groups))


def bare_throughput(program: str, folder: Path, group_bytes: int, segment_bytes: int, segments: int) -> list[float]:
    """[seconds, MB/s, median µs, p99 µs]"""
    folder.mkdir()
    arguments = [program, "write", str(folder), str(segments), str(segment_bytes), str(group_bytes)]
    out = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout
    remove(folder)
    return [float(number) for number in out.split()]


# Group, frame, bar. Frames of 16 KiB are what producers send unless told otherwise (Kafka's batch.size): the bars are
# theirs. Frames as large as the group show what is left when nothing is done a frame.
LOADS: dict[str, tuple[tuple[int, int, float | None], ...]] = {
    "64KB": ((64 * 1024, 16 * 1024, 0.6),),
    "256KB": ((256 * 1024, 16 * 1024, 0.8), (256 * 1024, 256 * 1024, None)),
    "1MB": ((1 * MiB, 16 * 1024, 0.8), (1 * MiB, 1 * MiB, None)),
}


def throughput(report: Report, program: str, scratch: Path, quick: bool, load: str) -> None:
    segment_bytes = 32 * MiB if quick else 64 * MiB
    for group_bytes, frame_bytes, bar in LOADS[load]:
        rounds = []
        like = float(group_bytes)  # the groups that the log made of this load, the last time
        for number in range((6 if bar else 3) if quick else 9):
            if number % 2:
                theirs = bare_throughput(program, scratch / "bare", round(like), segment_bytes, 4)[1]
            mine = trio.run(log_throughput, scratch / "log", group_bytes, segment_bytes, 4, frame_bytes)
            remove(scratch / "log")
            like = mine.group_bytes
            if not number % 2:
                theirs = bare_throughput(program, scratch / "bare", round(like), segment_bytes, 4)[1]
            rounds.append((mine.mb_per_s / theirs, mine.mb_per_s, theirs, mine.group_bytes))
        ratio = statistics.median(ratio for ratio, _, _, _ in rounds)
        report.add(
            f"committed, groups of {like / 1024:.0f} KB, frames of {frame_bytes // 1024} KB",
            statistics.median(mine for _, mine, _, _ in rounds),
            "MB/s",
            reference=statistics.median(theirs for _, _, theirs, _ in rounds),
            ratio=ratio,
            bar=None if bar is None else f"ratio >= {bar}",
            ok=None if bar is None else ratio >= bar,
        )


async def spare_is_filled(folder: Path, settings: LogSettings) -> None:
    with trio.fail_after(120):
        while not is_filled(folder / SPARE, settings.segment_bytes):
            await trio.sleep(0.05)


async def one_at_a_time(folder: Path, count: int) -> list[float]:
    batch = make_batch(1024)
    took = []
    settings = LogSettings(segment_bytes=16 * MiB, scrub_mb_per_s=0)
    async with leading(folder, settings) as log:
        # As the bare loop: in a file that was filled before, and nobody fills another one meanwhile.
        await spare_is_filled(folder, settings)
        while log.stats.segments_rolled < 1:
            for _ in range(64):
                log.append_batch("t", 0, make_batch(16 * 1024), record_count=1)
            await log.durable.wait(log.end)
        await spare_is_filled(folder, settings)
        for _ in range(count):
            began = time.perf_counter()
            await log.durable.wait(log.append_batch("t", 0, batch, record_count=1).end)
            took.append(time.perf_counter() - began)
    return took


def latency(report: Report, program: str, scratch: Path, quick: bool) -> None:
    rounds = []
    count = 1000 if quick else 5000
    for number in range(3):
        took = trio.run(one_at_a_time, scratch / f"latency-{number}", count)
        remove(scratch / f"latency-{number}")
        bare = bare_throughput(program, scratch / "bare", 1024 + 80, 1100 * count, 1)
        rounds.append((statistics.median(took) * 1e3 - bare[2] / 1e3, statistics.median(took) * 1e3, bare[2] / 1e3))
    above, ours_ms, bare_ms = statistics.median_low(rounds)
    report.limit("write and fdatasync of 1 KB, median", bare_ms, "ms")
    report.add(
        f"one record, append to durable ({above:.3f} ms above)", ours_ms, "ms", reference=bare_ms,
        bar="<= 0.2 ms above", ok=above <= 0.2,
    )  # fmt: skip


async def append_cost(folder: Path, count: int) -> tuple[float, float]:
    """CPU of the appending thread in `append_batch`, and of the whole process until all is durable; µs a frame."""
    batch = make_batch(1024)
    settings = LogSettings(segment_bytes=64 * MiB, scrub_mb_per_s=0)
    async with leading(folder, settings) as log:
        in_append = 0.0
        process = time.process_time()
        for _ in range(count // 200):
            began = time.thread_time()
            for number in range(200):
                log.append_batch("t", number % 8, batch, record_count=1)
            in_append += time.thread_time() - began
            await log.durable.wait(log.end)
        whole = time.process_time() - process
    return in_append / count * 1e6, whole / count * 1e6


async def waiters(folder: Path, rounds: int) -> tuple[float, float]:
    """64 producers who each wait for every record: frames a sync, records a second."""
    batch = make_batch(1024)
    settings = LogSettings(segment_bytes=64 * MiB, scrub_mb_per_s=0)
    async with leading(folder, settings) as log:
        frames, groups = log.stats.appended_frames, log.stats.groups_committed

        async def produce(number: int) -> None:
            for _ in range(rounds):
                await log.durable.wait(log.append_batch("t", number % 8, batch, record_count=1).end)

        began = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for number in range(64):
                nursery.start_soon(produce, number)
        seconds = time.perf_counter() - began
        frames, groups = log.stats.appended_frames - frames, log.stats.groups_committed - groups
    return frames / groups, frames / seconds


def append(report: Report, scratch: Path, quick: bool) -> None:
    in_append, whole = trio.run(append_cost, scratch / "append", 20_000 if quick else 200_000)
    report.add("append of a 1 KB frame, CPU", in_append, "µs", bar="<= 12 µs", ok=in_append <= 12)
    report.add("the same until durable, whole process", whole, "µs")
    remove(scratch / "append")
    frames, rate = trio.run(waiters, scratch / "waiters", 100 if quick else 1000)
    report.add("64 waiters: frames a sync", frames, "", bar=">= 20", ok=frames >= 20)
    report.add("64 waiters: records", rate, "1/s")
    remove(scratch / "waiters")


async def write_unsealed(folder: Path, size: int) -> None:
    """One segment of `size`, left as after a kill: no final mark."""
    batch = make_batch(16 * 1024)
    settings = LogSettings(segment_bytes=1024 * MiB, scrub_mb_per_s=0)
    async with leading(folder, settings) as log:
        while log.end + 20_000 < size:
            for _ in range(256):
                if log.end + 20_000 < size:
                    log.append_batch("t", 0, batch, record_count=1)
            await log.durable.wait(log.end)
            log.commit_to(log.end)


async def recover(folder: Path) -> float:
    disk = RealDisk(folder)
    began = time.perf_counter()
    await Log.open(disk, LogSettings(segment_bytes=1024 * MiB), "bench")
    took = time.perf_counter() - began
    disk.close()
    return took


async def random_reads(folder: Path, count: int) -> float:
    disk = RealDisk(folder)
    log = await Log.open(disk, LogSettings(segment_bytes=1024 * MiB, scrub_mb_per_s=0), "bench")
    async with trio.open_nursery() as nursery:
        await nursery.start(log.run)
        log.commit_to(log.end)
        end = log.end_offset("t", 0)
        rng = random.Random(1)
        began = time.perf_counter()
        for _ in range(count):
            fetched = await log.fetch("t", 0, rng.randrange(end), 1)
            assert len(fetched.batches) == 1
        rate = count / (time.perf_counter() - began)
        nursery.cancel_scope.cancel()
    disk.close()
    return rate


def recovery(report: Report, program: str, scratch: Path, quick: bool) -> None:
    folder = scratch / "recovery"
    trio.run(write_unsealed, folder, 256 * MiB if quick else 1000 * MiB)
    file = max((folder / "wal").glob("*.wal"))
    with file.open("r+b") as killed:
        blocks = killed.read(FRAMES_AT)
        rounds = []
        for _ in range(5):
            os.pwrite(killed.fileno(), blocks, 0)  # each time as the kill left it: no final mark
            ours = trio.run(recover, folder)
            bare = float(
                subprocess.run([program, "read", file, str(MiB)], check=True, capture_output=True).stdout.split()[0]
            )
            rounds.append((ours / bare, ours, bare))
    ratio, ours, bare = statistics.median_low(rounds)
    size = file.stat().st_size
    report.limit("reading the file from the page cache", size / 1e6 / bare, "MB/s")
    report.add(
        f"recovery of {size / 1e9:.2f} GB unsealed, 16 KB frames", ours, "s",
        reference=bare, ratio=ratio, bar="ratio <= 3", ok=ratio <= 3,
    )  # fmt: skip
    count = 3000 if quick else 20_000
    bare = float(
        subprocess.run([program, "random", str(file), "16384", "100000"], check=True, capture_output=True).stdout
    )
    report.add("random reads by offset, 16 KB batches", trio.run(random_reads, folder, count), "1/s", reference=bare)
    remove(folder)


def remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


def main() -> int:
    parser = arguments("wal", __doc__ or "")
    parser.add_argument("--only", choices=(*LOADS, "latency", "append", "recovery"), help="one part of it")
    options = parser.parse_args()
    report = Report("wal", options)
    quick: bool = options.quick
    block = random.Random(1).randbytes(MiB)
    began = time.perf_counter()
    for _ in range(200):
        crc32c(block)
    report.limit("CRC32C", 200 * len(block) / 1e9 / (time.perf_counter() - began), "GB/s")
    with scratch_folder() as name:
        scratch = Path(name)
        program = compile_c("bare_wal", name)
        for load in LOADS:
            if options.only in (None, load):
                throughput(report, program, scratch, quick, load)
        if options.only in (None, "latency"):
            latency(report, program, scratch, quick)
        if options.only in (None, "append"):
            append(report, scratch, quick)
        if options.only in (None, "recovery"):
            recovery(report, program, scratch, quick)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
