"""A cluster of real processes on loopback, for real clients: a leader and its followers, killed and started at will."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.end_to_end.processes import Process, Program


class Node(Process):
    """As clients meet it: with room for their loads, a rack of its own, and topics of four partitions."""

    def __init__(self, folder: Path, node_id: int, program: Program, **variables: str) -> None:
        super().__init__(folder, node_id, program)
        self.configure(
            wal_receiver_enabled="true",
            wal_segment_bytes="16MiB",
            min_free_bytes="64MiB",
            replication_heartbeat_timeout_secs="3",
            replication_reconnect_delay_secs="0.2",
            default_partitions="4",
            rack=f"rack-{node_id}",
        )
        self.configure(**variables)

    def metrics(self) -> dict[str, float]:
        """Every sample, by its name and labels as they stand on the page."""
        lines = self.get("/metrics").splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line and line[0] != "#"}


class Cluster:
    """The first node leads. Sync mode: acks=all means on one follower's disk too."""

    def __init__(self, folder: Path, followers: int = 2, **variables: str) -> None:
        self.followers = [Node(folder, n + 2, "follower", **variables) for n in range(followers)]
        wished = dict(variables)
        if followers:
            wished["replication_followers"] = ",".join(node.replication for node in self.followers)
            wished["replication_mode"] = "sync"
            wished["replication_sync_replicas"] = "1"
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
        """All of them; every one must end when it is asked to."""
        stuck = []
        for node in self.nodes:
            if node.alive:
                try:
                    node.stop()
                except subprocess.TimeoutExpired:
                    node.kill()
                    stuck.append(f"node {node.node_id} did not end:\n{node.said()[-4000:]}")
        assert not stuck, "\n".join(stuck)
