"""`scripts/bench parity`: how fast three copies are compared, beside what hashing the same files costs at all.

One run: three copies of 4 GB, of 64 KB and of 1 KB frames. The reference is Python's hashlib.sha256 over the same
files in two processes. Start-up is told apart from work; the second run, with what the first has proved, is measured
too; and the memory of driver, JVM and workers for logs of 1 and 8 GB. The files are read once before, so that all of
them meet the same page cache.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from report import Report, arguments, scratch_folder

from chronik_repl.demo.family import processes
from chronik_repl.spark.parity import Options, run
from chronik_repl.spark.session import open_session
from tests.spark.logs import Writer, batch

GB = 1 << 30
MB = 1 << 20
SEGMENT_BYTES = 64 * MB
COPIES = 3
TAIL_BYTES = 8 * MB  # of the active segment, which every run reads


def make_log(folder: Path, size: int, frame_bytes: int) -> Path:
    """A log of about `size` bytes; a batch's bytes are used again and again, so that writing it is quick."""
    writer = Writer(folder, segment_bytes=SEGMENT_BYTES)
    records = max(1, frame_bytes // 1024)
    raw = batch([(None, os.urandom(frame_bytes // records - 20), [])] * records)
    number = 0
    while writer.position < size:
        writer.data("bench", number % 16, raw, records)
        number += 1
    writer.close()
    return folder


def copies_of(folder: Path, count: int, *, linked: bool = False) -> list[Path]:
    copies = [folder, *(folder.with_name(f"{folder.name}-{number}") for number in range(1, count))]
    for copy in copies[1:]:
        shutil.copytree(folder, copy, copy_function=os.link if linked else shutil.copy2)
    return copies


def three_copies(folder: Path, size: int, frame_bytes: int, *, linked: bool = False) -> list[Path]:
    """Made, unless an earlier run has left them there (`--keep`)."""
    first = folder / f"log-{size}-{frame_bytes}{'-linked' if linked else ''}"
    done = first.with_suffix(".done")
    if not done.exists():
        copies_of(make_log(first, size, frame_bytes), COPIES, linked=linked)
        done.touch()
    return [first, *(first.with_name(f"{first.name}-{number}") for number in range(1, COPIES))]


def sha256(path: str) -> int:
    digest, size = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(4 * MB)
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            size += count
    return size


def hash_rate(copies: list[Path]) -> float:
    """GB/s of hashlib.sha256 over all files in two processes."""
    paths = [str(p) for c in copies for p in sorted((c / "wal").iterdir())]
    with ProcessPoolExecutor(2) as pool:
        list(pool.map(len, ["warm"] * 2))
        began = time.perf_counter()
        size = sum(pool.map(sha256, paths))
        return size / GB / (time.perf_counter() - began)


def compare(report: Report, spark: Any, folder: Path, size: int, frame_bytes: int, bar: float, rounds: int) -> None:
    """Hash and compare in turns, and take the best of each: what else runs on the machine should hit both alike."""
    name = f"{frame_bytes // 1024} KB frames"
    copies = three_copies(folder, size + TAIL_BYTES, frame_bytes)
    named = tuple((f"copy-{number}", str(copy)) for number, copy in enumerate(copies))
    state = folder / f"state-{frame_bytes}"
    shutil.rmtree(state, ignore_errors=True)
    options = Options(named, state=str(state))
    hash_rate(copies)  # once before, for the page cache
    reference, best = 0.0, None
    for _ in range(rounds):
        reference = max(reference, hash_rate(copies))
        full = run(spark, msgspec.structs.replace(options, full=True))
        assert full.verdict == "same", full
        best = full if best is None or full.work_s < best.work_s else best
    assert best is not None
    report.at_least(
        f"{name}: 3 × {size / GB:.3g} GB compared", best.bytes_read / GB / best.work_s, "GB/s", reference, bar
    )
    later = min((run(spark, options) for _ in range(rounds)), key=lambda r: r.work_s)
    assert later.verdict == "same", later
    report.at_most(f"{name}: read by the second run", later.bytes_read / MB, "MB", best.bytes_read / MB, 0.1)
    report.at_most(f"{name}: time of the second run", later.work_s, "s", best.work_s, 0.1)


def peak_memory(copies: list[Path]) -> dict[str, int]:
    """The highest resident bytes of `chronik parity` over these copies, by what the process is."""
    command = [sys.executable, "-m", "chronik_repl.cli", "parity", "--master", "local[2]", "--no-progress"]
    words = [f"copy-{i}={c}" for i, c in enumerate(copies)]
    process = subprocess.Popen([*command, *words], stdout=subprocess.DEVNULL)
    peak: dict[str, int] = {"driver": 0, "JVM": 0, "workers": 0}
    while process.poll() is None:
        now = {"driver": 0, "JVM": 0, "workers": 0}
        for pid, name in family(process.pid).items():
            kind = "driver" if pid == process.pid else "JVM" if name == "java" else "workers"
            now[kind] += resident(pid)
        peak = {kind: max(peak[kind], now[kind]) for kind in peak}
        time.sleep(0.05)
    assert process.returncode == 0, process.returncode
    return peak


def family(root: int) -> dict[int, str]:
    """A process and all that it started, with their names."""
    everyone = processes()
    found, fresh = {root: ""}, {root: ""}
    while fresh:
        fresh = {pid: name for pid, (parent, name) in everyone.items() if parent in fresh}
        found |= fresh
    return found


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


def measure_memory(report: Report, folder: Path, small: int, large: int) -> None:
    peaks = []
    for size in (small, large):
        peaks.append(peak_memory(three_copies(folder, size, 64 * 1024, linked=True)))
    for kind in ("driver", "JVM", "workers"):
        name = f"memory of the {kind}, log of {large / GB:.3g} GB against {small / GB:.3g} GB"
        report.at_most(name, peaks[1][kind] / MB, "MB", peaks[0][kind] / MB, 1.25)


def measure(report: Report, options: argparse.Namespace, folder: Path) -> None:
    size, small, large, rounds = (GB, GB // 4, GB, 1) if options.quick else (4 * GB, GB, 8 * GB, 3)
    rounds = options.rounds or rounds
    if options.only in (None, "memory"):
        measure_memory(report, folder, small, large)
    if options.only == "memory":
        return
    began = time.perf_counter()
    spark = open_session("local[2]")
    report.add("start-up of Spark", time.perf_counter() - began, "s")
    spark.sparkContext.parallelize(range(4), 4).map(lambda x: x).collect()
    report.add("start-up with its Python workers", time.perf_counter() - began, "s")
    for name, frame_bytes, bar in (("64KB", 64 * 1024, 0.5), ("1KB", 1024, 0.2)):
        if options.only in (None, name):
            compare(report, spark, folder, size, frame_bytes, bar, rounds)
    spark.stop()


def main(options: argparse.Namespace) -> int:
    report = Report("parity", options)
    if options.keep:
        Path(options.keep).mkdir(parents=True, exist_ok=True)
        measure(report, options, Path(options.keep))
    else:
        with scratch_folder() as scratch:
            measure(report, options, Path(scratch))
    return report.finish()


def parser() -> argparse.ArgumentParser:
    found = arguments("parity", "Compare three copies, against hashing the same files.")
    found.add_argument("--only", choices=("memory", "64KB", "1KB"), help="one part of it")
    found.add_argument("--rounds", type=int, default=0, help="the best of so many; default 3, with --quick 1")
    found.add_argument("--keep", metavar="DIR", help="make the logs there, leave them, and use those that are there")
    return found


if __name__ == "__main__":
    sys.exit(main(parser().parse_args()))
