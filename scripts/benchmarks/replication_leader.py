"""The leader of the replication bench: the production's node without the front doors, in a process of its own, and the
tasks beside it that append. Commands come as JSON lines on stdin, answers go to stdout; `Leader` is the other end.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import trio
from crc32c import crc32c

from chronik_repl.config import load
from chronik_repl.node import Node, run_node
from chronik_repl.replication.tcp import TcpNetwork, tls_contexts
from chronik_repl.wal.changes import TopicMade
from chronik_repl.wal.disk import RealDisk

MIB = 1 << 20
OUTSTANDING = 8
TOPIC = "load"


def batch(size: int) -> bytearray:
    """One record batch of about `size` bytes."""
    body = struct.pack(">hiqqqhii", 0, 0, 0, 0, -1, -1, -1, 1) + os.urandom(max(1, size - 61))
    return bytearray(struct.pack(">qiibI", 0, 9 + len(body), -1, 2, crc32c(body)) + body)


# ── the leader, in a process of its own ──────────────────────────────────────────────────────────────────────────


async def lead(environ: dict[str, str]) -> None:
    """Commands come as JSON lines on stdin, answers go to stdout."""
    settings = load(environ, "leader")
    tls = None
    if settings.replication_tls_cert:
        tls = tls_contexts(
            str(settings.replication_tls_cert), str(settings.replication_tls_key), str(settings.replication_tls_ca)
        )
    async with trio.open_nursery() as nursery:

        async def serve(task_status: trio.TaskStatus[Node]) -> None:
            await run_node(
                settings, RealDisk(settings.data_dir), TcpNetwork(tls), program="leader", task_status=task_status
            )

        node: Node = await nursery.start(serve)
        await node.wait_ready()
        node.log.append_change(TopicMade(TOPIC, 1))
        print(json.dumps({"ready": True}), flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            answer = await COMMANDS[(request := json.loads(line))["do"]](node, request)
            print(json.dumps(answer), flush=True)
        nursery.cancel_scope.cancel()


async def _load(node: Node, request: dict[str, Any]) -> dict[str, Any]:
    """So many bytes in groups of one size, at most eight of them not yet durable everywhere."""
    log, data = node.log, batch(request["group"])
    total, window = request["bytes"], OUTSTANDING * request["group"]
    began, done = time.monotonic(), 0
    while done < total:
        end = log.append_batch(TOPIC, 0, data, record_count=1).end
        done += len(data)
        if end - log.committed.value >= window:
            await log.committed.wait(end - window + 1)
    await log.committed.wait(log.end)
    return {"seconds": time.monotonic() - began, "bytes": done}


async def _cpu(node: Node, request: dict[str, Any]) -> dict[str, Any]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {"cpu_s": usage.ru_utime + usage.ru_stime}


async def _one(node: Node, request: dict[str, Any]) -> dict[str, Any]:
    log, data = node.log, batch(request["group"])
    took = []
    for _ in range(request["rounds"]):
        began = time.monotonic()
        await log.committed.wait(log.append_batch(TOPIC, 0, data, record_count=1).end)
        took.append(time.monotonic() - began)
    return {"us": statistics.median(took) * 1e6}


async def _lag(node: Node, request: dict[str, Any]) -> dict[str, Any]:
    """At a given rate: the time from the append to the moment when both followers have it durable."""
    log, data = node.log, batch(request["group"])
    interval, lags = request["group"] / request["bytes_per_s"], []

    async def watch(began: float, end: int) -> None:
        await log.committed.wait(end)  # type: ignore[arg-type]
        lags.append(time.monotonic() - began)

    async with trio.open_nursery() as nursery:
        start = time.monotonic()
        sent = 0
        while (now := time.monotonic()) < start + request["seconds"]:
            while sent * interval < now - start:
                nursery.start_soon(watch, time.monotonic(), log.append_batch(TOPIC, 0, data, record_count=1).end)
                sent += 1
            await trio.sleep(0.0005)
    lags.sort()
    return {"p50": lags[len(lags) // 2], "p99": lags[len(lags) * 99 // 100], "frames": len(lags)}


async def _frames(node: Node, request: dict[str, Any]) -> dict[str, Any]:
    """Many small frames, as fast as the leader's own disk takes them; how much memory that takes."""
    log, data = node.log, batch(request["size"])
    before = _rss()
    for number in range(request["count"]):
        end = log.append_batch(TOPIC, 0, data, record_count=1).end
        if number % 256 == 0 and end - log.durable.value > 4 * MIB:
            await log.durable.wait(end - 2 * MIB)  # type: ignore[arg-type]
        elif number % 64 == 0:
            await trio.lowlevel.checkpoint()
    await log.durable.wait(log.end)
    followers = [(f.state, f.ring_bytes, f.ring_drops) for f in node.status().followers]
    return {"before": before, "after": _rss(), "peak": _peak(), "followers": followers}


async def _roll(node: Node, request: dict[str, Any]) -> dict[str, Any]:
    """Begin a new segment: the one whose file was made ahead."""
    rolled = node.log.roll_aged(1 << 60)
    await node.log.committed.wait(node.log.end)
    return {"rolled": rolled}


async def _status(node: Node, request: dict[str, Any]) -> dict[str, Any]:
    followers = [(f.node_id, f.state, f.durable_end) for f in node.status().followers]
    return {"end": node.log.durable.value, "followers": followers, "members": len(node.peers)}


COMMANDS = {"load": _load, "cpu": _cpu, "one": _one, "lag": _lag, "frames": _frames, "status": _status, "roll": _roll}


def _rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Leader:
    def __init__(self, folder: Path, followers: list[str], **variables: str) -> None:
        environ = {
            "CHRONIK_NODE_ID": "1",
            "CHRONIK_DATA_DIR": str(folder / "leader"),
            "CHRONIK_REPLICATION_FOLLOWERS": ",".join(followers),
            "CHRONIK_LOG_LEVEL": "error",
            "CHRONIK_SCRUB_MB_PER_SEC": "0",
            "CHRONIK_REPLICATION_HEARTBEAT_INTERVAL_SECS": "0.5",  # as its followers expect it
            "CHRONIK_REPLICATION_HEARTBEAT_TIMEOUT_SECS": "2",
        } | {f"CHRONIK_{name.upper()}": value for name, value in variables.items()}
        self.process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(environ)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer()["ready"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while True:
            line = self.process.stdout.readline()
            assert line, "the leader ended"
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer

    def do(self, what: str, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what, **request}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


if __name__ == "__main__":
    trio.run(lead, json.loads(sys.argv[1]))
