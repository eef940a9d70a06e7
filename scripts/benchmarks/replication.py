"""scripts/bench replication: what it costs to have a log three times, against what the machine can do at all.

The leader here is the production's node without the front doors, and a task beside it that appends; the followers
are `chronik-follower` processes. The bare loops are C (bare_replication.c): the same groups, three processes, files
that are overwritten and synced. All is measured in one run, so that ratios mean something on a busy machine too.

Like for like: against a loop that overwrites files which were filled with zeros before its clock starts, the nodes
write into a segment that was filled ahead, as their spare is when a load begins; against one that fills as it goes,
into segments of the usual size, which they fill meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import ssl
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import trio
from replication_leader import MIB, OUTSTANDING, TOPIC, Leader, batch
from report import Report, arguments, compile_c, is_filled, scratch_folder

from chronik_repl import certs
from chronik_repl.replication.ring import Ring
from chronik_repl.replication.tcp import tls_contexts
from chronik_repl.wal.changes import EpochStart, TopicMade
from chronik_repl.wal.committer import SPARE
from chronik_repl.wal.disk import RealDisk
from chronik_repl.wal.log import Log, LogSettings
from tests.end_to_end.processes import Process, until


@contextlib.contextmanager
def cluster(
    folder: Path, *, sync: int = 2, tls: bool = False, segment_bytes: int = 64 * MIB, **variables: str
) -> Iterator[tuple[Leader, list[Process]]]:
    """A leader and two followers, all members."""
    folder.mkdir()
    common: dict[str, str] = {
        "wal_segment_bytes": str(segment_bytes),
        "min_free_bytes": "64MiB",
        "scrub_mb_per_sec": "0",
    }
    mine: dict[str, str] = {}
    if tls:
        certs.make(folder / "certs", ["node-1", "node-2", "node-3"])

    def certificates(node_id: int) -> dict[str, str]:
        place = folder / "certs"
        names = {"cert": f"node-{node_id}.pem", "key": f"node-{node_id}.key", "ca": "ca.pem"}
        return {f"replication_tls_{what}": str(place / name) for what, name in names.items()} if tls else {}

    followers = [Process(folder, node_id, "follower") for node_id in (2, 3)]
    leader = None
    try:
        for follower in followers:
            follower.start(log_level="error", **common, **certificates(follower.node_id))
            follower.wait_ready()
        mine = certificates(1)
        mode = {"replication_mode": "sync", "replication_sync_replicas": str(sync)} if sync else {}
        leader = Leader(folder, [f.replication for f in followers], **common, **mode, **mine, **variables)
        until(lambda: leader.do("status")["members"] == 3, "all are members")
        leader.do("one", rounds=200, group=1024)  # warm
        yield leader, followers
    finally:
        if leader is not None:
            leader.end()
        for follower in followers:
            if follower.alive:
                follower.resume()
                follower.kill()
        shutil.rmtree(folder)  # all parts together are more than many a disk has room for


def cpu_seconds(process: Process) -> float:
    fields = Path(f"/proc/{process.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ── the measurements ─────────────────────────────────────────────────────────────────────────────────────────────


ROUNDS = 5


def bare(program: str, *arguments_: object) -> float:
    """The last figure that the C program says."""
    out = subprocess.run([program, *map(str, arguments_)], check=True, capture_output=True, text=True).stdout
    return float(out.split()[-1])


class Rounds(NamedTuple):
    """Ours and the bare loop in turns, so that what else the machine does meets both: medians."""

    value: float
    reference: float
    ratio: float


def in_turns(rounds: int, ours: Callable[[], float], reference: Callable[[], float]) -> Rounds:
    pairs = []
    for _ in range(rounds):
        beside = reference()
        pairs.append((ours(), beside))
    values, references = zip(*pairs, strict=True)
    ratio = statistics.median(value / beside for value, beside in pairs)
    return Rounds(statistics.median(values), statistics.median(references), ratio)


def megabytes_per_s(answer: dict[str, Any]) -> float:
    return float(answer["bytes"] / 1e6 / answer["seconds"])


def fresh_segment(leader: Leader, folder: Path, segment_bytes: int) -> None:
    """All three go on in a segment that was filled with zeros before, and nothing is being filled any more."""
    spares_are_full(folder, segment_bytes)
    leader.do("one", rounds=1, group=1024)
    assert leader.do("roll")["rolled"]
    spares_are_full(folder, segment_bytes)


def spares_are_full(folder: Path, segment_bytes: int) -> None:
    def full() -> bool:
        spares = list(folder.glob(f"*/{SPARE}"))
        return len(spares) == 3 and all(is_filled(spare, segment_bytes) for spare in spares)

    until(full, "the spare segments are filled", 300)


SIZES = ((64 << 10, "64 KB", None), (256 << 10, "256 KB", 0.6), (MIB, "1 MB", 0.6))


def shipping(report: Report, program: str, folder: Path, quick: bool) -> None:
    """MB/s durable on all three."""
    total, rounds = (64 if quick else 256) * MIB, 3 if quick else ROUNDS
    segment_bytes = total + 16 * MIB
    cpu = []
    with cluster(folder / "ship", segment_bytes=segment_bytes) as (leader, followers):

        def all_cpu() -> float:
            return sum(map(cpu_seconds, followers)) + float(leader.do("cpu")["cpu_s"])

        for size, name, bar in SIZES:

            def load(size: int = size) -> float:
                fresh_segment(leader, folder / "ship", segment_bytes)
                before = all_cpu()
                answer = leader.do("load", bytes=total, group=size)
                cpu.append((all_cpu() - before) / (answer["bytes"] / 1e9) if size >= 256 << 10 else 0.0)
                return megabytes_per_s(answer)

            seen = in_turns(
                rounds, load, lambda size=size: bare(program, "ship", folder, total, size, OUTSTANDING)  # type: ignore[misc]
            )  # fmt: skip
            what = f"durable on three, groups of {name}"
            if bar is None:
                report.add(what, seen.value, "MB/s", reference=seen.reference, ratio=seen.ratio)
            else:
                _at_least(report, what, seen, bar)
        worst = statistics.median(value for value in cpu if value)
        report.add("CPU of all three, 256 KB and above", worst, "s/GB", bar="<= 10 s/GB", ok=worst <= 10)
        one = in_turns(
            rounds,
            lambda: float(leader.do("one", rounds=500, group=1024)["us"]),
            lambda: bare(program, "one", folder, 500, 1024),
        )
        report.add("one at a time, 1 KB", one.value, "us", reference=one.reference, ratio=one.ratio)


def filling(report: Report, program: str, folder: Path, quick: bool) -> None:
    """The same over segments of 64 MiB, whose zeros are written while the clock runs, on both sides."""
    total, rounds = (128 if quick else 512) * MIB, 2 if quick else ROUNDS
    rates = []
    with cluster(folder / "filling") as (leader, _):
        for size, name, _ in SIZES:
            leader.do("load", bytes=64 * MIB, group=size)
            seen = in_turns(
                rounds,
                lambda size=size: megabytes_per_s(leader.do("load", bytes=total, group=size)),  # type: ignore[misc]
                lambda size=size: bare(program, "fill", folder, total, size, OUTSTANDING),  # type: ignore[misc]
            )
            rates.append(seen.value * 1e6)
            report.add(
                f"durable on three, {name}, filling included", seen.value, "MB/s", reference=seen.reference,
                ratio=seen.ratio,
            )  # fmt: skip
        rate = rates[0] / 2
        lag = leader.do("lag", group=16 << 10, bytes_per_s=rate, seconds=3 if quick else 10)
        report.add(f"lag p50 at {rate / 1e6:.0f} MB/s", lag["p50"] * 1e3, "ms")
        report.add("lag p99 there", lag["p99"] * 1e3, "ms", bar="< 100 ms", ok=lag["p99"] < 0.1)


def _at_least(report: Report, what: str, seen: Rounds, bar: float) -> None:
    report.add(
        what, seen.value, "MB/s", reference=seen.reference, ratio=seen.ratio, bar=f"ratio >= {bar}",
        ok=seen.ratio >= bar,
    )  # fmt: skip


def over_tls(report: Report, folder: Path, quick: bool) -> None:
    total, rounds = (64 if quick else 256) * MIB, 3 if quick else ROUNDS
    segment_bytes = total + 16 * MIB
    cpu = []
    with cluster(folder / "tls", tls=True, segment_bytes=segment_bytes) as (leader, followers):

        def all_cpu() -> float:
            return sum(map(cpu_seconds, followers)) + float(leader.do("cpu")["cpu_s"])

        def load() -> float:
            fresh_segment(leader, folder / "tls", segment_bytes)
            before = all_cpu()
            answer = leader.do("load", bytes=total, group=256 << 10)
            cpu.append((all_cpu() - before) / (answer["bytes"] / 1e9))
            return megabytes_per_s(answer)

        seen = in_turns(rounds, load, lambda: bare_tls(folder / "tls" / "certs", total))
        _at_least(report, "durable on three over TLS, 256 KB", seen, 0.6)
        reference = bare_tls_cpu(folder / "tls" / "certs", total)
        spent = statistics.median(cpu)
        report.add("CPU of all three over TLS", spent, "s/GB", reference=reference, ratio=spent / reference)


def bare_tls_cpu(folder: Path, total: int) -> float:
    """What the two bare TLS streams cost, of all three processes."""
    before = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    bare_tls(folder, total)
    after = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    spent = sum(y.ru_utime + y.ru_stime - x.ru_utime - x.ru_stime for x, y in zip(before, after, strict=True))
    return spent / (total / 1e9)


def bare_tls(folder: Path, total: int) -> float:
    """Two plain TLS 1.3 streams at once from one process to two others, 256 KB a send, nothing written anywhere."""
    server, client = tls_contexts(*(str(folder / name) for name in ("node-1.pem", "node-1.key", "ca.pem")))
    import socket

    pids, links = [], []
    listener = socket.create_server(("127.0.0.1", 0))
    for _ in range(2):
        pid = os.fork()
        if not pid:
            with contextlib.suppress(ssl.SSLError, OSError):
                taken = client.wrap_socket(socket.create_connection(listener.getsockname()))
                buffer, got = bytearray(256 << 10), 0
                while got < total:
                    got += taken.recv_into(buffer)
                taken.sendall(b"x")
            os._exit(0)
        pids.append(pid)
        links.append(server.wrap_socket(listener.accept()[0], server_side=True))
    data = os.urandom(256 << 10)
    began = time.monotonic()
    for _ in range(0, total, len(data)):
        for link in links:
            link.sendall(data)
    for link in links:
        link.recv(1)
    seconds = time.monotonic() - began
    for pid in pids:
        os.waitpid(pid, 0)
    return total / 1e6 / seconds


def rings(report: Report, folder: Path) -> None:
    """What two rings add to an append of 1 KB."""

    async def measure() -> float:
        log = await Log.open(RealDisk(folder / "rings"), LogSettings(min_free_bytes=0), "bench")
        async with trio.open_nursery() as nursery:
            await nursery.start(log.run)
            log.found("bench") if not log.segments else None
            log.begin_epoch(1, EpochStart(1, "bench"))  # type: ignore[arg-type]
            log.append_change(TopicMade(TOPIC, 1))
            data, costs = batch(1024), []
            for _ in range(5):
                pair = []
                for count in (0, 2):
                    for _ in range(count):
                        ring = Ring(100_000, 64 * MIB, log.end)
                        log.listeners.append(ring.push)
                    began = time.process_time()
                    for _ in range(5000):
                        log.append_batch(TOPIC, 0, data, record_count=1)
                    pair.append((time.process_time() - began) / 5000)
                    log.listeners.clear()
                    await log.durable.wait(log.end)
                costs.append(pair[1] - pair[0])
            nursery.cancel_scope.cancel()
        return statistics.median(costs) * 1e6

    cost = trio.run(measure)
    report.add("two rings on the append path", cost, "us/frame", bar="<= 5 us", ok=cost <= 5)


def catching_up(report: Report, program: str, folder: Path, quick: bool) -> None:
    """A follower that was away for two gigabytes, from the moment when it has the first of them."""
    total, rounds = (384 if quick else 2048) * MIB, 3
    with cluster(folder / "catchup", sync=0) as (leader, followers):
        away = followers[1]

        def catch_up() -> float:
            away.kill()
            leader.do("load", bytes=total, group=MIB)
            behind = _position(leader, 3)
            end = leader.do("status")["end"]
            until(lambda: _position(leader, 2) == end, "the other one is there", 120)
            away.start()
            away.wait_ready()
            began_at = until(lambda: _position(leader, 3) > behind and time.monotonic(), "it began")
            first = _position(leader, 3)
            with _telling_why(leader, away):
                until(lambda: _position(leader, 3) >= end, "it has caught up", 120)
            return float((end - first) / 1e6 / (time.monotonic() - began_at))

        seen = in_turns(rounds, catch_up, lambda: bare(program, "catchup", folder, total))
        _at_least(report, "catch-up", seen, 0.6)
        best = bare(program, "overwrite", folder, total)
        report.add(
            "the same against overwriting", seen.value, "MB/s", reference=best, ratio=seen.value / best
        )  # fmt: skip


@contextlib.contextmanager
def _telling_why(leader: Leader, follower: Process) -> Iterator[None]:
    """Where everybody stands, if that does not happen: in what each thread waits, and for what position."""
    try:
        yield
    except AssertionError:
        print(leader.do("status"), follower.said()[-2000:], file=sys.stderr)
        for pid in (leader.process.pid, follower.process.pid):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                where = [(thread / name).read_text().strip() for name in ("comm", "wchan", "syscall")]
                print(pid, *where, file=sys.stderr)
        raise


def _position(leader: Leader, node_id: int) -> int:
    return int(next(end for node, _, end in leader.do("status")["followers"] if node == node_id))


def stopped_follower(report: Report, folder: Path, quick: bool) -> None:
    """How much the leader's memory grows while one follower takes nothing."""
    ring, frames = 64 * MIB, 200_000 if quick else 1_000_000
    with cluster(folder / "stopped", sync=0) as (leader, followers):
        leader.do("frames", size=1024, count=20_000)
        followers[1].process.send_signal(signal.SIGSTOP)
        seen = leader.do("frames", size=1024, count=frames)
        grown = (max(seen["peak"], seen["after"]) - seen["before"]) / MIB
        allowed = ring / MIB + 64
        report.add(
            f"memory, one follower stopped for {frames:,} frames", grown, "MiB",
            bar=f"<= {allowed:.0f} MiB", ok=grown <= allowed,
        )  # fmt: skip


def main() -> int:
    parser = arguments("replication", __doc__.split("\n\n")[0].replace("scripts/bench replication: ", ""))
    parser.add_argument(
        "--only", choices=("ship", "filling", "tls", "rings", "catchup", "memory"), help="one part of it"
    )
    options = parser.parse_args()
    report = Report("replication", options)
    with scratch_folder() as name:
        folder = Path(name)
        program = compile_c("bare_replication", name)
        parts: dict[str, Callable[[], object]] = {
            "ship": lambda: shipping(report, program, folder, options.quick),
            "filling": lambda: filling(report, program, folder, options.quick),
            "tls": lambda: over_tls(report, folder, options.quick),
            "rings": lambda: rings(report, folder),
            "catchup": lambda: catching_up(report, program, folder, options.quick),
            "memory": lambda: stopped_follower(report, folder, options.quick),
        }
        for part, run in parts.items():
            if options.only in (None, part):
                run()
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
