"""A cluster of real processes on loopback, for real clients: a leader and its followers, killed and started at will."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.ports import free_port

ENTRY = "import sys; from chronik_repl import process; sys.exit(process.{program}())"
READY_S = 60.0


def wait_for(condition: Callable[[], Any], what: str, deadline_s: float = 60.0) -> Any:
    """Whatever the condition gives, once it is true. Fails by name after the deadline."""
    until = time.monotonic() + deadline_s
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > until:
            raise AssertionError(f"{what}: not within {deadline_s:.0f} s")
        time.sleep(0.02)


class Node:
    """One process. Its ports and directory are its own for as long as the test runs."""

    def __init__(self, folder: Path, node_id: int, program: str, **variables: str) -> None:
        self.node_id = node_id
        self.program = program
        self.data_dir = folder / f"node-{node_id}"
        self.kafka, self.http, self.replication = (f"127.0.0.1:{free_port()}" for _ in range(3))
        self.log_file = folder / f"node-{node_id}.log"
        self.variables = {
            "NODE_ID": str(node_id),
            "DATA_DIR": str(self.data_dir),
            "KAFKA_BIND_ADDR": self.kafka,
            "HTTP_BIND_ADDR": self.http,
            "WAL_RECEIVER_ENABLED": "true",
            "WAL_RECEIVER_BIND_ADDR": self.replication,
            "WAL_SEGMENT_BYTES": str(16 << 20),
            "MIN_FREE_BYTES": str(64 << 20),
            "REPLICATION_HEARTBEAT_INTERVAL_SECS": "0.5",
            "REPLICATION_HEARTBEAT_TIMEOUT_SECS": "3",
            "REPLICATION_RECONNECT_DELAY_SECS": "0.2",
            "DEFAULT_PARTITIONS": "4",
            "RACK": f"rack-{node_id}",
            **variables,
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert self.process is None
        environ = {name: value for name, value in os.environ.items() if not name.startswith("CHRONIK_")}
        environ |= {f"CHRONIK_{name}": value for name, value in self.variables.items()}
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", ENTRY.format(program=self.program)],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        """As a power switch does: no goodbye."""
        self.stop(signal.SIGKILL)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(how)
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"node {self.node_id} did not end on {how.name}\n{self.tail()}") from None
            finally:
                self.process = None

    def ready(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"node {self.node_id} exited with {self.process.returncode}\n{self.tail()}")
        try:
            with urllib.request.urlopen(f"http://{self.http}/readyz", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def wait_ready(self) -> None:
        wait_for(self.ready, f"node {self.node_id} ready", READY_S)

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://{self.http}/status", timeout=5) as answer:
            status: dict[str, Any] = json.load(answer)
            return status

    def metrics(self) -> dict[str, float]:
        """Every sample, by its name and labels as they stand on the page."""
        with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line and line[0] != "#"}

    def tail(self) -> str:
        return self.log_file.read_text(errors="replace")[-4000:] if self.log_file.exists() else ""


class Cluster:
    """The first node leads. Sync mode: acks=all means on one follower's disk too."""

    def __init__(self, folder: Path, followers: int = 2, **variables: str) -> None:
        self.followers = [Node(folder, n + 2, "follower", **variables) for n in range(followers)]
        wished = dict(variables)
        if followers:
            wished["REPLICATION_FOLLOWERS"] = ",".join(node.replication for node in self.followers)
            wished["REPLICATION_MODE"] = "sync"
            wished["REPLICATION_SYNC_REPLICAS"] = "1"
        self.leader = Node(folder, 1, "leader", **wished)

    @property
    def nodes(self) -> list[Node]:
        return [self.leader, *self.followers]

    @property
    def bootstrap(self) -> str:
        return ",".join(node.kafka for node in self.nodes)

    def start(self) -> None:
        for node in (*self.followers, self.leader):
            node.start()
        for node in self.nodes:
            node.wait_ready()

    def kill_leader_and_start_it_again(self) -> None:
        self.leader.kill()
        self.leader.start()
        self.leader.wait_ready()

    def stop(self) -> None:
        failures = []
        for node in self.nodes:
            try:
                node.stop()
            except AssertionError as error:
                failures.append(str(error))
        assert not failures, "\n".join(failures)
