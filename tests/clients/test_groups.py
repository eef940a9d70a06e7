"""Consumer groups of real processes: members die and come, the leader dies and comes back, and nothing is forgotten."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.clients.cluster import Cluster
from tests.clients.ledger import PARTITIONS
from tests.clients.test_confluent import IMPATIENT, make_topic, produce
from tests.end_to_end.processes import until

RECORDS = 8_000
IDEMPOTENT: dict[str, Any] = {"enable.idempotence": True}


class Member:
    def __init__(self, cluster: Cluster, group: str, topic: str, file: Path) -> None:
        self.file = file
        file.touch()
        command = [sys.executable, "-m", "tests.clients.member", cluster.bootstrap, group, topic, str(file)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def lines(self) -> list[str]:
        return self.file.read_text().splitlines()

    def partitions(self) -> int:
        """As it last said. -1: nothing yet."""
        assigned = [line for line in self.lines() if line.startswith("assigned")]
        return int(assigned[-1].split()[1]) if assigned else -1

    def numbers(self) -> set[int]:
        return {int(line) for line in self.lines() if line.isdigit()}

    def end(self, how: str = "terminate") -> None:
        if self.process.poll() is None:
            getattr(self.process, how)()
        self.process.wait(15)


def shared_out(members: list[Member]) -> bool:
    return sum(max(member.partitions(), 0) for member in members) == PARTITIONS and all(
        member.partitions() > 0 for member in members
    )


def committed(cluster: Cluster, group: str, topic: str) -> list[int]:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    asked = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, n) for n in range(PARTITIONS)])
    found = admin.list_consumer_group_offsets([asked])[group].result(20)
    return [place.offset for place in found.topic_partitions]


def test_members_die_and_come_and_the_leader_is_restarted(
    cluster: Cluster, fresh: Callable[[str], str], tmp_path: Path
) -> None:
    topic, group = make_topic(cluster, fresh("group")), fresh("group")
    members = [Member(cluster, group, topic, tmp_path / f"member-{n}") for n in range(3)]
    try:
        until(lambda: shared_out(members), "three members share the partitions")
        produced = produce(cluster, topic, RECORDS, **IDEMPOTENT)
        members[0].end("kill")
        until(lambda: shared_out(members[1:]), "the two that are left share what the dead one had")
        members.append(Member(cluster, group, topic, tmp_path / "member-3"))
        until(lambda: shared_out(members[1:]), "the one that came has its share")
        cluster.kill_leader_and_start_it_again()
        produced.acked |= produce(cluster, topic, RECORDS, first=RECORDS, **IDEMPOTENT).acked
        assert len(produced.acked) == 2 * RECORDS
        until(
            lambda: set().union(*(member.numbers() for member in members)) >= produced.acked,
            "every record was processed",
        )
        for member in members[1:]:
            member.end()
        offsets = committed(cluster, group, topic)
        assert sum(offsets) == 2 * RECORDS
        cluster.kill_leader_and_start_it_again()
        assert committed(cluster, group, topic) == offsets
    finally:
        for member in members:
            member.end("kill")


class Watcher:
    """Three members in this process, and every change that they hear of."""

    def __init__(self, cluster: Cluster, group: str, topic: str) -> None:
        self.changes: list[str] = []
        self.seen = 0
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        config = {
            "bootstrap.servers": cluster.bootstrap, "group.id": group, "auto.offset.reset": "earliest",
            "session.timeout.ms": 30000, "heartbeat.interval.ms": 300, "auto.commit.interval.ms": 200,
            "fetch.wait.max.ms": 100, **IMPATIENT,
        }  # fmt: skip
        self.consumers = [Consumer(config) for _ in range(3)]
        self._threads = [threading.Thread(target=self._run, args=(consumer, topic)) for consumer in self.consumers]
        for thread in self._threads:
            thread.start()

    def _run(self, consumer: Consumer, topic: str) -> None:
        consumer.subscribe(
            [topic],
            on_assign=lambda _, places: self.changes.append(f"assigned {len(places)}"),
            on_revoke=lambda _, places: self.changes.append("revoked"),
            on_lost=lambda _, places: self.changes.append("lost"),
        )
        while not self._stopping.is_set():
            read = sum(1 for message in consumer.consume(500, 0.1) if not message.error())
            with self._lock:
                self.seen += read
        consumer.close()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(20)


def test_a_restart_of_the_leader_causes_no_rebalance(cluster: Cluster, fresh: Callable[[str], str]) -> None:
    topic, group = make_topic(cluster, fresh("steady")), fresh("steady")
    watcher = Watcher(cluster, group, topic)
    try:
        until(lambda: len(watcher.changes) == 3, "three members have their share")
        before = list(watcher.changes)
        produce(cluster, topic, 2000, **IDEMPOTENT)
        until(lambda: watcher.seen == 2000, "all is read")
        cluster.kill_leader_and_start_it_again()
        produce(cluster, topic, 2000, **IDEMPOTENT)
        until(lambda: watcher.seen >= 4000, "all is read after the restart")
        until(
            lambda: cluster.leader.metrics().get('chronik_kafka_requests_total{api="Heartbeat"}', 0) >= 9,
            "the members' heartbeats reach the leader again",
        )
        assert watcher.changes == before
        assert watcher.seen == 4000
        rebalances = [v for k, v in cluster.leader.metrics().items() if k.startswith("chronik_kafka_group_rebalances")]
        assert sum(rebalances) == 0  # a new process counts from 0
    finally:
        watcher.stop()


def test_a_promoted_follower_goes_on_with_groups_and_producers(tmp_path: Path, fresh: Callable[[str], str]) -> None:
    """The leader's machine is lost. What was acked, the group, its offsets and the producer's sequence are not."""
    cluster = Cluster(tmp_path)
    cluster.start()
    watcher = None
    try:
        topic, group = make_topic(cluster, fresh("promoted")), fresh("promoted")
        watcher = Watcher(cluster, group, topic)
        until(lambda: len(watcher.changes) == 3, "three members have their share")
        before = list(watcher.changes)

        def lose_the_leader() -> None:
            cluster.leader.kill()
            promote(cluster.followers[0].data_dir)

        ledger = produce(cluster, topic, 20_000, in_the_middle=lose_the_leader, **IDEMPOTENT)
        assert len(ledger.acked) == 20_000
        until(lambda: watcher.seen >= 20_000, "all is read")
        assert watcher.changes == before
        assert watcher.seen == 20_000  # a duplicate would be one more
    finally:
        if watcher is not None:
            watcher.stop()
        cluster.stop()


def promote(data_dir: Path) -> None:
    deadline = time.monotonic() + 20
    while True:
        command = [sys.executable, "-m", "chronik_repl.cli", "promote", "--data-dir", str(data_dir)]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("CHRONIK_")}
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=environ)
        if done.returncode == 0:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"promote: {done.stdout}{done.stderr}")
