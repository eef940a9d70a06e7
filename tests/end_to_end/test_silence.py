"""Nobody leads: every node that is left says so, who led last, and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.end_to_end.processes import Process, running_processes, until


def chronik_status(node: Process) -> str:
    command = [str(Path(sys.executable).parent / "chronik"), "status", "--data-dir", str(node.data_dir)]
    wide = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, env=wide, capture_output=True, text=True, check=True).stdout


def told(node: Process) -> str:
    return str(node.status().get("no_leader", ""))


def test_a_follower_whose_leader_is_gone_or_silent_says_so_and_stops_when_it_is_back(tmp_path: Path) -> None:
    advice = "no leader is known; node 1 led last (epoch 1): start it, or promote one (chronik promote)"
    with running_processes(tmp_path) as cluster:
        leader, follower = cluster.leader_and(1), cluster.nodes[2]
        assert told(follower) == told(leader) == ""
        for how, back in ((leader.pause, leader.resume), (leader.kill, leader.start)):
            how()
            until(lambda: told(follower) == advice, "it is in /status")
            shown = chronik_status(follower)
            assert advice in shown
            assert f"node 1 at {leader.kafka}" not in shown
            back()
            until(lambda: told(follower) == "", "the leader is heard again")
            assert f"node 1 at {leader.kafka}" in chronik_status(follower)
        epoch = leader.status()["epoch"]
        leader.kill()
        until(lambda: advice.replace("epoch 1", f"epoch {epoch}") in follower.said(), "it is a line of its log")


def test_a_leader_that_is_not_the_newest_epochs_says_that_it_waits(tmp_path: Path) -> None:
    with running_processes(tmp_path) as cluster:
        leader = cluster.leader_and(1)
        new = cluster.nodes[2]
        leader.configure(wal_receiver_enabled="true")
        leader.stop()
        leader.start()
        leader.wait_ready()
        until(lambda: len(new.status().get("members", ())) == 2, "both are members")
        cluster.same_logs()
        new.call("promote")
        until(lambda: (leader.status().get("leader") or {}).get("node_id") == 2, "the old leader follows")
        cluster.same_logs()
        leader.kill()
        new.kill()
        leader.start()
        until(lambda: told(leader) != "", "it says why it does not lead")
        epoch = leader.status()["epoch"]
        assert told(leader) == (
            f"no leader is known; node 2 led last (epoch {epoch}): start it, or promote one (chronik promote)"
        )
        assert told(leader) in chronik_status(leader)
        until(lambda: told(leader) in leader.said(), "it is a line of its log")


def test_a_follower_that_nobody_has_called_says_how_to_list_it(tmp_path: Path) -> None:
    with running_processes(tmp_path) as cluster:
        follower = cluster.add(2)
        follower.start()
        follower.wait_ready()
        assert f"`chronik members add {follower.replication}`" in told(follower)
        until(lambda: told(follower) in follower.said(), "it is a line of its log")
