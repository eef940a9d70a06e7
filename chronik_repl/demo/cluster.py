"""Real nodes on this machine: the programs as an operator would start them, on free ports, in one temporary folder.

Nodes die with the demo, however it ends: the kernel is asked to kill them when their parent goes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from chronik_repl.demo.family import dies_with_us

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.05
LOG_LINES_SHOWN = 15


class DemoFailed(Exception):
    """Something did not go as the story has it; the message says what."""


class Node:
    """One process and its directory. It keeps its ports over a restart."""

    def __init__(self, node_id: int, program: Literal["leader", "follower"], folder: Path) -> None:
        self.node_id = node_id
        self.program = program
        self.data_dir = folder / f"node-{node_id}"
        self.log_file = folder / f"node-{node_id}.log"
        self.kafka = self.http = self.replication = "127.0.0.1:0"
        self._process: subprocess.Popen[bytes] | None = None
        self._seen = 0  # how much of the log file an earlier life wrote

    def start(self, **variables: str) -> None:
        """Returns when it is ready."""
        self.launch(**variables)
        self.wait_ready()

    def launch(self, **variables: str) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("CHRONIK_")}
        environ |= {
            "CHRONIK_NODE_ID": str(self.node_id),
            "CHRONIK_DATA_DIR": str(self.data_dir),
            "CHRONIK_KAFKA_BIND_ADDR": self.kafka,
            "CHRONIK_HTTP_BIND_ADDR": self.http,
            "CHRONIK_WAL_RECEIVER_ENABLED": "true",
            "CHRONIK_WAL_RECEIVER_BIND_ADDR": self.replication,
            "CHRONIK_WAL_SEGMENT_BYTES": "4MiB",
            "CHRONIK_MIN_FREE_BYTES": "64MiB",
            "CHRONIK_LOG_FORMAT": "json",
            "CHRONIK_REPLICATION_RECONNECT_DELAY_SECS": "1",
        } | {f"CHRONIK_{name}": value for name, value in variables.items()}
        program = Path(sys.executable).parent / f"chronik-{self.program}"
        self._seen = self.log_file.stat().st_size if self.log_file.exists() else 0
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [program], env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=dies_with_us()
            )

    def wait_ready(self) -> None:
        ready = self._ready_line()
        self.kafka, self.http, self.replication = ready["kafka"], ready["http"], ready["replication"]

    def _ready_line(self) -> dict[str, str]:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            for line in self.log_file.read_bytes()[self._seen :].splitlines():
                if line.startswith(b"{") and b'"ready"' in line:
                    found: dict[str, str] = json.loads(line)
                    if found.get("event") == "ready":
                        return found
            if self._process.poll() is not None:
                raise DemoFailed(
                    f"node {self.node_id} ended with code {self._process.returncode}:\n{self.last_lines()}"
                )
            time.sleep(POLL_S)
        raise DemoFailed(f"node {self.node_id} was not ready within {START_TIMEOUT_S:.0f} s:\n{self.last_lines()}")

    def last_lines(self) -> str:
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def page(self) -> str:
        return f"http://{self.http}/"

    def kill(self) -> None:
        """As a power cut would: no last words."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def status(self) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://{self.http}/status", timeout=5) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except (OSError, ValueError) as error:
            raise DemoFailed(f"node {self.node_id} does not answer ({error}):\n{self.last_lines()}") from error


class Cluster:
    """A leader and its followers, in sync mode: acks=all waits for one of them."""

    def __init__(self, folder: Path, followers: int = 2) -> None:
        self.leader = Node(1, "leader", folder)
        self.followers = [Node(node_id, "follower", folder) for node_id in range(2, 2 + followers)]

    @property
    def nodes(self) -> list[Node]:
        return [self.leader, *self.followers]

    def start(self) -> None:
        for follower in self.followers:
            follower.launch()
        for follower in self.followers:
            follower.wait_ready()
        addresses = ",".join(follower.replication for follower in self.followers)
        self.leader.start(
            REPLICATION_FOLLOWERS=addresses,
            REPLICATION_MODE="sync",
            REPLICATION_SYNC_REPLICAS="1",
            DEFAULT_PARTITIONS="3",
        )

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def follower_status(self, node_id: int) -> dict[str, Any]:
        """As the leader sees it."""
        for one in self.leader.status()["followers"]:
            if one["node_id"] == node_id:
                found: dict[str, Any] = one
                return found
        return {"state": "connecting", "lag_positions": 0, "lag_records": 0}

    def wait(self, what: str, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            for node in self.nodes:
                if not node.alive and node._process is not None and node._process.returncode != -signal.SIGKILL:
                    raise DemoFailed(f"node {node.node_id} ended by itself:\n{node.last_lines()}")
            if time.monotonic() > deadline:
                raise DemoFailed(f"waited {timeout_s:.0f} s in vain until {what}. Is this machine busy? Then try again")
            time.sleep(POLL_S)
