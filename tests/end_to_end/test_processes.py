"""The programs as an operator runs them."""

from __future__ import annotations

import contextlib
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import Producer

from chronik_repl.errors import Refused
from tests.end_to_end.processes import Process, Processes, running_processes, stream_bytes, until


def produce(leader: Process, count: int, first: int = 0) -> None:
    """All of them acked by acks=all."""
    failed: list[object] = []
    producer = Producer({"bootstrap.servers": leader.kafka, "acks": "all", "message.timeout.ms": 20000})
    for number in range(first, first + count):
        producer.produce("orders", b"%d" % number, on_delivery=lambda error, _: failed.append(error) if error else None)
    assert producer.flush(30) == 0
    assert not failed


def assert_same_bytes(cluster: Processes) -> None:
    log = cluster.same_logs()
    streams = {
        node_id: stream_bytes(node.data_dir, log["start"], log["end"]) for node_id, node in cluster.nodes.items()
    }
    assert len(streams[1]) == log["end"] - log["start"]
    assert len(set(streams.values())) == 1


def test_killed_nodes_come_back_with_the_same_bytes(tmp_path: Path) -> None:
    with running_processes(tmp_path) as cluster:
        leader = cluster.leader_and(2, replication_mode="sync")
        produce(leader, 1000)
        assert_same_bytes(cluster)
        for node_id in (2, 3, 1):
            cluster.nodes[node_id].kill()
            cluster.nodes[node_id].start()
            cluster.nodes[node_id].wait_ready()
            until(lambda: leader.status().get("role") == "leader", "it leads")
            produce(leader, 100)
        assert_same_bytes(cluster)
        for node in cluster.nodes.values():
            node.kill()
        for node_id in (1, 2, 3):
            cluster.nodes[node_id].start()
        leader.wait_ready()
        produce(leader, 100)
        assert_same_bytes(cluster)


def test_sigterm_drains_and_exits_0(tmp_path: Path) -> None:
    with running_processes(tmp_path) as cluster:
        leader = cluster.leader_and(1)
        produce(leader, 10)
        assert leader.stop() == 0
        assert cluster.nodes[2].stop() == 0
        assert "Traceback" not in leader.said() + cluster.nodes[2].said()


def test_promote_by_control_socket_drains_the_old_leader(tmp_path: Path) -> None:
    """In async mode, with a leader that cannot be dialled: it grants over the session that it dialled itself."""
    with running_processes(tmp_path) as cluster:
        leader = cluster.leader_and(2)
        produce(leader, 100)
        new = cluster.nodes[2]
        control_socket = new.data_dir / "control.sock"
        assert stat.S_IMODE(control_socket.stat().st_mode) == 0o600
        new.call("promote")
        assert new.status()["role"] == "leader"
        assert leader.process.wait(10) == 5
        assert "chronik-follower" in leader.said()
        produce(new, 100)
        # Its directory rejoins as a follower's.
        leader.program = "follower"
        leader.start()
        new.call("members-add", address=leader.replication)
        log = cluster.same_logs()
        assert stream_bytes(leader.data_dir, 0, log["end"]) == stream_bytes(new.data_dir, 0, log["end"])


def test_promote_refuses_and_says_what_is_missing(tmp_path: Path) -> None:
    with running_processes(tmp_path) as cluster:
        leader = cluster.leader_and(2)
        produce(leader, 10)
        cluster.same_logs()
        leader.kill()
        missing = (
            "2 of 3 members agree and 3 are needed; no answer from node 1. Start what is missing, or lead without it"
        )
        with pytest.raises(Refused, match=missing):
            cluster.nodes[2].call("promote")
        cluster.nodes[2].call("promote", accept_loss=True)
        produce(cluster.nodes[2], 10)
        assert [m["node_id"] for m in cluster.nodes[2].call("members")["members"]] == [2, 3]


def test_version_and_help_and_bad_configuration() -> None:
    def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        code = "from chronik_repl.process import leader; leader()"
        return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environ)

    assert run("--version").stdout.startswith("chronik-repl ")
    assert "exit codes" in run("--help").stdout
    wrong = run(CHRONIK_NODE_ID="0", CHRONIK_DATA_DIRR="x")
    assert wrong.returncode == 2
    assert "CHRONIK_DATA_DIR" in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_directory_in_use_is_refused(tmp_path: Path) -> None:
    with running_processes(tmp_path) as cluster:
        first = cluster.add(1, "leader")
        first.start()
        first.wait_ready()
        second = Process(tmp_path, 1, "leader")
        second.log_file = tmp_path / "second.log"
        second.start()
        assert second.process.wait(20) == 3
        assert str(first.process.pid) in second.said()
        first.process.send_signal(signal.SIGTERM)


def test_clients_cannot_take_the_log_its_open_files(tmp_path: Path) -> None:
    with running_processes(tmp_path) as cluster:
        leader = cluster.add(1, "leader", prefix=("prlimit", "--nofile=700:700"))
        leader.start(wal_segment_bytes="1MiB")
        leader.wait_ready()
        producer = Producer({"bootstrap.servers": leader.kafka, "acks": "all"})
        producer.produce("orders", b"the first")
        assert producer.flush(30) == 0
        host, port = leader.kafka.split(":")
        with contextlib.ExitStack() as held:
            for _ in range(800):
                held.enter_context(socket.create_connection((host, int(port))))
            until(lambda: "chronik_kafka_connections 60" in (leader.get("/metrics") or ""), "it lets in what it can")
            for _ in range(50):  # segments are made and sealed meanwhile
                producer.produce("orders", b"x" * 100_000)
            assert producer.flush(30) == 0
            assert leader.alive, leader.said()[-2000:]
        assert leader.status()["log"]["segments"] > 3
        assert "only 60 Kafka connections" in leader.said()
