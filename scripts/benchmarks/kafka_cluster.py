"""A leader and two followers as processes of their own, for the Kafka benchmark."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 30.0
TICK = os.sysconf("SC_CLK_TCK")


class Cluster:
    """A leader and two followers, in sync mode, on free ports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self.kafka = [f"127.0.0.1:{port}" for port in _free_ports(3)]
        self.http = [f"127.0.0.1:{port}" for port in _free_ports(3)]
        self.receivers = [f"127.0.0.1:{port}" for port in _free_ports(3)]

    def start(self) -> None:
        for number in (1, 2, 0):
            environ = {key: value for key, value in os.environ.items() if not key.startswith("CHRONIK_")} | {
                "PYTHONPATH": str(Path(__file__).parents[2]),  # not this folder, whose kafka.py is not the package
                "CHRONIK_NODE_ID": str(number + 1),
                "CHRONIK_DATA_DIR": str(self.folder / f"node-{number + 1}"),
                "CHRONIK_KAFKA_BIND_ADDR": self.kafka[number],
                "CHRONIK_HTTP_BIND_ADDR": self.http[number],
                "CHRONIK_WAL_RECEIVER_BIND_ADDR": self.receivers[number],
                "CHRONIK_REPLICATION_RECONNECT_DELAY_SECS": "1",
                "CHRONIK_MIN_FREE_BYTES": "0",
            }
            program = "follower"
            if number == 0:
                program = "leader"
                environ |= {
                    "CHRONIK_REPLICATION_FOLLOWERS": ",".join(self.receivers[1:]),
                    "CHRONIK_REPLICATION_MODE": "sync",
                    "CHRONIK_REPLICATION_SYNC_REPLICAS": "1",
                }
            with open(self.folder / f"node-{number + 1}.log", "wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-c", f"from chronik_repl.process import {program}; {program}()"],
                        env=environ,
                        stdout=log,
                        stderr=log,
                    )
                )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._complete():
            if time.monotonic() > deadline:
                raise SystemExit(f"the cluster did not come up in {START_TIMEOUT_S:.0f} s:\n{self.logs()}")
            time.sleep(0.1)

    def _complete(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            status = self.status()
            streaming = [f for f in status["followers"] if f["member"] and f["state"] == "streaming"]
            return bool(status["ready"] and status["sync_in_force"] and len(streaming) == 2)
        return False

    def logs(self) -> str:
        """The last that each node said."""
        return "\n".join((self.folder / f"node-{n}.log").read_text()[-4000:] for n in (1, 2, 3))

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://{self.http[0]}/status", timeout=5) as answer:
            whole: dict[str, Any] = json.load(answer)
            return whole

    def cpu_s(self) -> list[float]:
        """Of each process so far, kernel time included: followers first, the leader last."""
        used = []
        for process in self.processes:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
            used.append((int(fields[11]) + int(fields[12])) / TICK)
        return used

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
