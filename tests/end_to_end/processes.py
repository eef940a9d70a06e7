"""Real processes: `chronik-leader` and `chronik-follower` on loopback, killed, paused and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import chronik_repl
from chronik_repl import control
from tests.ports import free_port

Program = Literal["leader", "follower"]
DEADLINE_S = 60.0


def until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """The first true answer."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"not within {deadline_s} s: {what}")


class Process:
    """One node's program, and its directory."""

    def __init__(
        self, path: Path, node_id: int, program: Program, *, host: str = "127.0.0.1", prefix: tuple[str, ...] = ()
    ) -> None:
        self.node_id, self.program, self.host, self.prefix = node_id, program, host, prefix
        self.data_dir = path / f"node-{node_id}"
        self.log_file = path / f"node-{node_id}.log"
        self.replication, self.kafka, self.http = (f"{host}:{free_port()}" for _ in range(3))
        self.environ = {
            "CHRONIK_NODE_ID": str(node_id),
            "CHRONIK_DATA_DIR": str(self.data_dir),
            "CHRONIK_WAL_RECEIVER_BIND_ADDR": self.replication,
            "CHRONIK_KAFKA_BIND_ADDR": self.kafka,
            "CHRONIK_HTTP_BIND_ADDR": self.http,
            "CHRONIK_WAL_SEGMENT_BYTES": "4MiB",
            "CHRONIK_MIN_FREE_BYTES": "16MiB",
            "CHRONIK_REPLICATION_HEARTBEAT_INTERVAL_SECS": "0.5",
            "CHRONIK_REPLICATION_HEARTBEAT_TIMEOUT_SECS": "2",
            "CHRONIK_REPLICATION_RECONNECT_DELAY_SECS": "1",
        }
        self.running: subprocess.Popen[bytes] | None = None

    def configure(self, **variables: str) -> None:
        self.environ |= {f"CHRONIK_{name.upper()}": value for name, value in variables.items()}

    def start(self, **variables: str) -> None:
        self.configure(**variables)
        plain = {name: value for name, value in os.environ.items() if not name.startswith("CHRONIK_")}
        plain["PYTHONPATH"] = str(Path(chronik_repl.__file__).parent.parent)
        code = f"from chronik_repl.process import {self.program}; {self.program}()"
        with self.log_file.open("ab") as log:
            self.running = subprocess.Popen(
                [*self.prefix, sys.executable, "-c", code],
                env=plain | self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self.running is not None
        return self.running

    @property
    def alive(self) -> bool:
        return self.running is not None and self.running.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self, deadline_s: float = DEADLINE_S) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(deadline_s)

    def said(self) -> str:
        return self.log_file.read_text(errors="replace")

    def get(self, path: str) -> Any:
        """What HTTP answers, or None where nobody does."""
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", timeout=5) as answer:
                return json.load(answer) if path == "/status" else answer.read().decode()
        except (OSError, ValueError):
            return None

    def status(self) -> dict[str, Any]:
        return self.get("/status") or {}

    def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        return control.call(self.data_dir, {"command": command, **arguments})

    def wait_ready(self, deadline_s: float = DEADLINE_S) -> None:
        def ready() -> bool:
            assert self.alive, f"node {self.node_id} ended: {self.said()[-2000:]}"
            return bool(self.get("/readyz"))

        until(ready, f"node {self.node_id} is ready", deadline_s)


class Processes:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.nodes: dict[int, Process] = {}

    def add(self, node_id: int, program: Program = "follower", **options: Any) -> Process:
        node = self.nodes[node_id] = Process(self.path, node_id, program, **options)
        return node

    def leader_and(self, followers: int, **variables: str) -> Process:
        for node_id in range(2, followers + 2):
            self.add(node_id).start()
        listed = ",".join(node.replication for node in self.nodes.values())
        leader = self.add(1, "leader")
        leader.start(replication_followers=listed, **variables)
        for node in self.nodes.values():
            node.wait_ready()
        until(lambda: len(leader.status().get("members", ())) == followers + 1, "all are members")
        return leader

    def leader(self) -> Process:
        """Whoever leads now."""

        def find() -> Process | None:
            leading = [
                (s["epoch"], n) for n in self.nodes.values() if n.alive and (s := n.status()).get("role") == "leader"
            ]
            return max(leading, key=lambda found: found[0])[1] if leading else None

        found: Process = until(find, "someone leads")
        return found

    def same_logs(self, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """All living nodes hold the same log, committed to its end. Returns what they say of it."""

        def same() -> dict[str, Any] | None:
            logs = [node.status().get("log", {}) for node in self.nodes.values() if node.alive]
            keys = ("end", "end_checksum", "durable_end", "high_watermark")
            ends = {tuple(log.get(key) for key in keys) for log in logs}
            if len(ends) == 1 and logs[0] and logs[0]["end"] == logs[0]["durable_end"] == logs[0]["high_watermark"]:
                return dict(logs[0])
            return None

        found: dict[str, Any] = until(same, "the logs are the same", deadline_s)
        return found

    def end(self) -> None:
        for node in self.nodes.values():
            if node.alive:
                node.process.kill()
        for node in self.nodes.values():
            if node.running is not None:
                node.running.wait()


@contextmanager
def running_processes(path: Path) -> Iterator[Processes]:
    processes = Processes(path)
    try:
        yield processes
    finally:
        processes.end()


def stream_bytes(data_dir: Path, start: int, end: int) -> bytes:
    """The log's own bytes between two positions, read from the segments' files."""
    files = sorted((data_dir / "wal").glob("*.wal"))
    found = bytearray()
    for file in files:
        first = int(file.stem)
        data = file.read_bytes()[12288:]
        low, high = max(start, first), min(end, first + len(data))
        if low < high:
            del found[low - start :]
            found += data[low - first : high - first]
    return bytes(found)
