"""`chronik` in front of a real leader and follower, and the programs' own first and last words."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chronik_repl import control
from chronik_repl.cli import build_parser, main
from chronik_repl.demo.cluster import Cluster, Node
from chronik_repl.demo.shop import Shop
from chronik_repl.errors import Refused

PROGRAMS = Path(sys.executable).parent


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("cluster"), followers=1)
    try:
        running.start()
        shop = Shop(running.leader.kafka, 200)
        shop.open()
        running.wait("orders were acked", lambda: shop.acked > 100)
        shop.close()
        assert shop.check(running.leader.kafka) == ""
        yield running
    finally:
        running.stop()


def chronik(*arguments: str | Path, code: int = 0, **variables: str) -> str:
    environ = {"PATH": os.environ["PATH"], "COLUMNS": "120", **variables}
    command = [str(PROGRAMS / "chronik"), *map(str, arguments)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


def chronik_json(*arguments: str | Path, code: int = 0, **variables: str) -> Any:
    return json.loads(chronik(*arguments, "--json", code=code, **variables))


def test_status_by_socket_by_http_and_by_environment(cluster: Cluster) -> None:
    leader = cluster.leader
    by_socket = chronik_json("status", "--data-dir", leader.data_dir)
    by_http = chronik_json("status", "--http", leader.http)
    by_environment = chronik_json("status", CHRONIK_DATA_DIR=str(leader.data_dir))
    for status in (by_socket, by_http, by_environment):
        assert (status["node_id"], status["role"], status["mode"]) == (1, "leader", "sync")
        assert [follower["node_id"] for follower in status["followers"]] == [2]
    text = chronik("status", "--http", leader.http)
    for part in ("leader in epoch", "ready", "acks=all", "streaming", "same to"):
        assert part in text


def test_watching_goes_on_until_it_is_stopped(cluster: Cluster) -> None:
    command = [str(PROGRAMS / "chronik"), "status", "--watch", "--json", "--http", cluster.leader.http]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first, second = (json.loads(process.stdout.readline()) for _ in range(2))
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    assert second["uptime_s"] > first["uptime_s"]


def test_topics_and_groups(cluster: Cluster) -> None:
    where = ("--data-dir", cluster.leader.data_dir)
    (topic,) = chronik_json("topics", *where)["topics"]
    assert topic["topic"] == "orders"
    assert len(topic["partitions"]) == 3
    assert sum(one["high_watermark"] for one in topic["partitions"]) > 100
    assert chronik_json("topics", "orders", "--http", cluster.followers[0].http)["topics"] == [topic]
    assert "orders" in chronik("topics", *where)
    assert "there is no topic nope" in chronik("topics", "nope", *where, code=2)
    assert isinstance(chronik_json("groups", *where)["groups"], list)
    chronik("groups", *where)


def test_members(cluster: Cluster) -> None:
    listed = chronik_json("members", "--data-dir", cluster.leader.data_dir)["members"]
    assert sorted(member["node_id"] for member in listed) == [1, 2]
    assert "127.0.0.1" in chronik("members", "--data-dir", cluster.leader.data_dir)
    where = ("--data-dir", cluster.leader.data_dir)
    assert "whom?" in chronik("members", "remove", *where, code=2)
    assert "leave 3 out" in chronik("members", "list", "3", *where, code=2)
    all_of_them = f"members are node 1 {cluster.leader.replication}, node 2 {cluster.followers[0].replication}"
    for nobody in ("127.0.0.1:1", "3", "9" * 30, "²"):
        assert all_of_them in chronik("members", "remove", nobody, *where, code=2)
    for known in ("2", cluster.followers[0].replication):
        assert "waits for 1 follower, and without node 2 there would be 0" in chronik(
            "members", "remove", known, *where, code=2
        )


@pytest.mark.parametrize("command", ["status", "topics", "groups"])
def test_nobody_there_is_said_and_what_to_do(command: str, tmp_path: Path) -> None:
    assert "Give its HTTP address with --http" in chronik(command, "--http", "127.0.0.1:1", code=2)
    assert "no node runs in" in chronik(command, "--data-dir", tmp_path, code=2)


MISTAKES = [
    ((), "usage: chronik"),
    (("certs", "/proc/nowhere", "1"), "/proc/nowhere: No such file or directory. Is the path right?"),
    (("users", "add", "alice", "--file", "users"), "give it with --password-stdin"),
    (("users", "list", "--file", "/nowhere/users"), "`chronik users add NAME"),
    (("users", "list", "--file", "/"), "Give a file that this user can read"),
    (("users", "add", "alice", "--file", "nowhere/users"), "nowhere is not a directory: make it first"),
    (("certs", "certs", "1", "--days", "0"), "--days 0: from 1 to"),
    (("certs", "certs", "1", "--days", "99999999"), "--days 99999999: from 1 to"),
    (("certs", "certs", "1", "--host", "node1:9291"), "without a port"),
    (("certs", "certs", "1", "--host", "exämple"), "a DNS name or an IP address is expected"),
    (("certs", "/etc/passwd", "1"), "/etc/passwd is not a directory"),
    (("users", "add", "alice"), "Give --file, or set"),
    (("config", "/nowhere.env"), "like those in config/"),
    (("config", "/bin/sh"), "not text"),
    (("wal", "verify", "/nowhere"), "Give a node's data directory"),
    (("wal", "verify", "/etc/passwd"), "Give a node's data directory"),
    (("wal", "dump", "/etc"), "not a node's data directory"),
    (("wal", "dump", "/etc", "--from", "9", "--to", "9"), "must be above --from"),
    (("backup", "/nowhere", "copy"), "is no node's directory"),
    (("parity", "one", "two"), "is not NAME=PATH, for example"),
    (("parity", "one=/nowhere"), "give at least two"),
    (("members", "add"), "As in: chronik members add"),
    (("status", "--http", "127.0.0.1:99999"), "Give its HTTP address with --http"),
    (("status", "--http", "127.0.0.1:9644 x"), "host:port is expected"),
    (("status", "--http", "ftp://127.0.0.1"), "host:port is expected"),
    (("status", "--http", "127.0.0.1:1", "--ca", "ca.pem"), "give --http https://127.0.0.1:1"),
    (("status", "--http", "https://127.0.0.1:1", "--ca", "/nowhere"), "Give a file with certificates"),
    (("status", "--http", "https://127.0.0.1:1", "--ca", "/dev/null"), "Give a file with certificates"),
]


@pytest.mark.parametrize(("words", "says"), MISTAKES, ids=[" ".join(words) or "nothing" for words, _ in MISTAKES])
def test_a_mistake_is_answered_with_what_to_do(
    words: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CHRONIK_DATA_DIR", raising=False)
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        assert main(words) == 2
    assert says in capsys.readouterr().err


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """It, and all below it."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers(below)


@pytest.mark.parametrize("command", list(parsers(build_parser())), ids=lambda parser: str(parser.prog))
def test_help_has_examples_that_are_commands(command: argparse.ArgumentParser) -> None:
    said = command.format_help()
    assert "examples:\n" in said
    examples = re.findall(r"(?m)(?:^  |\| |&& |\()(chronik [^|)]*?)(?:  .*|\)| \|.*)?$", said.partition("examples:")[2])
    assert examples
    for example in examples:
        build_parser().parse_args(shlex.split(example)[1:])


@pytest.mark.parametrize("command", list(parsers(build_parser())), ids=lambda parser: str(parser.prog))
def test_help_explains_every_word(command: argparse.ArgumentParser) -> None:
    chosen = [action for action in command._actions if not isinstance(action, argparse._SubParsersAction)]
    assert [action.dest for action in chosen if not action.help] == []


@pytest.mark.parametrize("command", ["members", "promote"])
def test_what_acts_needs_to_know_where(command: str, tmp_path: Path) -> None:
    assert "CHRONIK_DATA_DIR" in chronik(command, code=2)
    assert "no node runs in" in chronik(command, "--data-dir", tmp_path, code=2)


def test_a_port_that_is_not_http_is_told_from_a_silent_one(cluster: Cluster) -> None:
    for address in (cluster.leader.kafka, cluster.followers[0].replication):
        assert "does not speak HTTP as a node does. Give the address" in chronik("status", "--http", address, code=2)
    assert "does not speak TLS" in chronik("status", "--http", f"https://{cluster.leader.http}", code=2)


@pytest.mark.parametrize("seconds", ["nan", "-1", "soon"])
def test_a_wait_that_is_no_time_is_refused(seconds: str) -> None:
    assert "allowed is seconds from 0" in chronik("status", f"--wait={seconds}", code=2)


def test_parity_takes_the_leaders_address_as_status_does(cluster: Cluster) -> None:
    from chronik_repl.spark.parity import ask_leader

    for address in (cluster.leader.http, cluster.leader.page):
        assert ask_leader(address).role == "leader"


def test_a_full_or_closed_output_is_no_bug(cluster: Cluster) -> None:
    command = [str(PROGRAMS / "chronik"), "topics", "--data-dir", str(cluster.leader.data_dir)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "No space left on device. Make room" in done.stderr
    closed = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True)
    assert (closed.returncode, closed.stderr) == (0, "")


def test_certificates(tmp_path: Path) -> None:
    made = chronik("certs", tmp_path / "certs", "1", "2", "--host", "node1.example").split()
    assert {Path(name).name for name in made} == {
        "ca.pem",
        "ca.key",
        "node-1.pem",
        "node-1.key",
        "node-2.pem",
        "node-2.key",
    }
    assert (tmp_path / "certs" / "node-1.key").stat().st_mode & 0o077 == 0
    assert "is there already" in chronik("certs", tmp_path / "certs", "3", "1", code=2)
    assert not (tmp_path / "certs" / "node-3.key").exists(), "nothing was changed"
    (tmp_path / "certs" / "node-1.key").unlink()
    before = sorted((tmp_path / "certs").iterdir())
    assert "is there already" in chronik("certs", tmp_path / "certs", "3", "1", code=2)
    assert sorted((tmp_path / "certs").iterdir()) == before, "all or none"
    for nobody in ("0", "one", "-1"):
        assert "a node's number is expected" in chronik("certs", tmp_path / "certs", "--", nobody, code=2)
    (tmp_path / "certs" / "ca.pem").write_text("no certificate")
    assert "restore them" in chronik("certs", tmp_path / "certs", "3", code=2)


def test_a_backup_starts_as_a_node(cluster: Cluster, tmp_path: Path) -> None:
    node = Node(9, "follower", tmp_path)
    chronik("backup", cluster.followers[0].data_dir, node.data_dir)
    try:
        node.start()
        copied = node.status()
    finally:
        node.stop()
    assert copied["log"]["end"] > 0
    assert copied["cluster_id"] == cluster.leader.status()["cluster_id"]
    assert copied["directory_id"] != cluster.followers[0].status()["directory_id"]


def test_promote_hands_over_and_back(cluster: Cluster) -> None:
    follower = cluster.followers[0]
    for node in (follower, cluster.leader):
        chronik("promote", "--data-dir", node.data_dir)
        cluster.wait(f"node {node.node_id} led", lambda node=node: node.status()["role"] == "leader")  # type: ignore[misc]


def test_the_http_door_behind_tls(tmp_path: Path) -> None:
    chronik("certs", tmp_path / "certs", "1")
    cert, key = str(tmp_path / "certs" / "node-1.pem"), str(tmp_path / "certs" / "node-1.key")
    node = Node(1, "leader", tmp_path)
    node.start(HTTP_TLS_CERT=cert, HTTP_TLS_KEY=key)
    try:
        address = f"https://{node.http}"
        assert chronik_json("status", "--http", address, "--ca", tmp_path / "certs" / "ca.pem")["node_id"] == 1
        assert "Give its CA with --ca" in chronik("status", "--http", address, code=2), "nobody vouches for it"
        assert "https://… where" in chronik("status", "--http", node.http, code=2), "not in the clear"
    finally:
        node.stop()


def start(program: str, folder: Path, **variables: str) -> subprocess.Popen[str]:
    environ = {
        "PATH": os.environ["PATH"],
        "CHRONIK_NODE_ID": "1",
        "CHRONIK_DATA_DIR": str(folder / "data"),
        "CHRONIK_KAFKA_BIND_ADDR": "127.0.0.1:0",
        "CHRONIK_HTTP_BIND_ADDR": "127.0.0.1:0",
        "CHRONIK_WAL_RECEIVER_BIND_ADDR": "127.0.0.1:0",
        "CHRONIK_MIN_FREE_BYTES": "1MiB",
        **variables,
    }
    return subprocess.Popen([PROGRAMS / program], env=environ, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("variable", [f"CHRONIK_{door}_BIND_ADDR" for door in ("HTTP", "KAFKA", "WAL_RECEIVER")])
def test_a_port_in_use_ends_the_program_with_a_clear_message(variable: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        process = start("chronik-follower", tmp_path, **{variable: address})
        _, said = process.communicate(timeout=30)
    assert process.returncode == 2, said
    assert address in said
    assert "already in use" in said
    assert "Traceback" not in said
    assert not (tmp_path / "data").exists(), "nothing was changed"


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("KAFKA_TLS_CERT", "KAFKA_TLS_KEY"), "`chronik certs` makes"),
        (("HTTP_TLS_CERT", "HTTP_TLS_KEY"), "`chronik certs` makes"),
        (("KAFKA_USERS_FILE",), "`chronik users add` writes them"),
    ],
)
def test_a_file_that_is_no_good_ends_the_program_before_anything_is_made(
    names: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    process = start("chronik-leader", tmp_path, **{f"CHRONIK_{name}": "/etc/passwd" for name in names})
    _, said = process.communicate(timeout=30)
    assert process.returncode == 2, said
    assert says in said
    assert not (tmp_path / "data").exists()


def test_an_address_of_another_machine_is_told_which_are_good(tmp_path: Path) -> None:
    process = start("chronik-leader", tmp_path, CHRONIK_KAFKA_BIND_ADDR="192.0.2.1:0", CHRONIK_INSECURE="true")
    _, said = process.communicate(timeout=30)
    assert process.returncode == 2, said
    assert "Name an address of this machine" in said
    assert "Traceback" not in said


def test_a_second_start_in_one_directory_names_the_first(cluster: Cluster, tmp_path: Path) -> None:
    """Not only its ports, which are taken too."""
    leader = cluster.leader
    process = start(
        "chronik-leader", tmp_path, CHRONIK_DATA_DIR=str(leader.data_dir), CHRONIK_HTTP_BIND_ADDR=leader.http
    )
    _, said = process.communicate(timeout=30)
    assert process.returncode == 3, said
    assert "is in use by process" in said


def test_a_wrong_variable_ends_the_program_with_all_that_is_wrong(tmp_path: Path) -> None:
    process = start("chronik-leader", tmp_path, CHRONIK_LOG_LEVEL="loud", CHRONIK_NODE_ID="0")
    _, said = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "CHRONIK_LOG_LEVEL=loud" in said
    assert "CHRONIK_NODE_ID=0" in said


def test_a_directory_that_cannot_be_made_ends_the_program_with_a_clear_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    process = start("chronik-follower", tmp_path, CHRONIK_DATA_DIR=str(tmp_path / "file" / "data"))
    _, said = process.communicate(timeout=30)
    assert process.returncode == 2, said
    assert "CHRONIK_DATA_DIR=" in said
    assert "Name a folder" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("name", ["wal", "lock"])
def test_a_directory_that_a_node_did_not_leave_so_ends_the_program_with_a_clear_message(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    if name == "wal":
        (tmp_path / "data" / "wal").touch()
    else:
        (tmp_path / "data" / "lock").mkdir()
    process = start("chronik-leader", tmp_path)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 3, said
    assert f"data/{name}: " in said
    assert "to this process's user" in said
    assert "Traceback" not in said


def test_damage_ends_the_program_with_what_to_do(tmp_path: Path) -> None:
    process = start("chronik-leader", tmp_path)
    assert process.stderr is not None
    next(line for line in process.stderr if "ready" in line)
    process.terminate()
    process.communicate(timeout=30)
    (segment,) = (tmp_path / "data" / "wal").glob("*.wal")
    os.truncate(segment, 100)
    process = start("chronik-leader", tmp_path)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 3, said
    assert "100 bytes are too few for a segment. `chronik wal verify` shows all of it." in said


def test_an_address_that_is_none_is_told_what_one_looks_like(tmp_path: Path) -> None:
    process = start("chronik-leader", tmp_path, CHRONIK_KAFKA_BIND_ADDR="127.0.0.1:99999")
    _, said = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "allowed is host:port, such as 127.0.0.1:9092" in said


def test_a_node_without_room_says_so_and_what_to_do(tmp_path: Path) -> None:
    """Its clients are told of a disk error, and no more."""
    process = start("chronik-leader", tmp_path, CHRONIK_MIN_FREE_BYTES="500TiB")
    deadline = time.monotonic() + 30
    said: list[str] = []
    try:
        while not any("CHRONIK_MIN_FREE_BYTES (500TiB)" in text and "Free some space" in text for text in said):
            assert time.monotonic() < deadline, said
            with contextlib.suppress(Refused):  # not up yet
                status = control.call(tmp_path / "data", {"command": "status"})["status"]
                said = [event["text"] for event in status["events"]]
            time.sleep(0.05)
    finally:
        process.terminate()
        _, log = process.communicate(timeout=30)
    assert "Free some space" in log


def test_systemd_hears_of_readiness_and_of_the_end(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        path = str(tmp_path / "notify")
        supervisor.bind(path)
        supervisor.settimeout(30)
        process = start("chronik-leader", tmp_path, NOTIFY_SOCKET=path)
        try:
            assert supervisor.recv(4096).startswith(b"READY=1")
            process.terminate()
            assert supervisor.recv(4096).startswith(b"STOPPING=1")
            _, said = process.communicate(timeout=30)
            assert process.returncode == 0, said
        finally:
            process.kill()
            process.wait()
