"""Every variable is read, checked and explained; a wrong start says everything that is wrong at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chronik_repl.cli import main
from chronik_repl.config import VARIABLES, Settings, load
from chronik_repl.config_command import read_file
from chronik_repl.errors import ConfigError
from chronik_repl.values import Size, show_size

MINIMUM = {"CHRONIK_NODE_ID": "1", "CHRONIK_DATA_DIR": "data"}
MIB, GIB = 1 << 20, 1 << 30


def settings(**values: str) -> Settings:
    return load(MINIMUM | {f"CHRONIK_{name}": value for name, value in values.items()}, "leader")


def refusal(**values: str) -> str:
    with pytest.raises(ConfigError) as caught:
        settings(**values)
    return str(caught.value)


def test_the_documented_defaults() -> None:
    expected: dict[str, Any] = {
        "cluster_id": "",
        "replication_followers": (),
        "replication_mode": "async",
        "replication_sync_replicas": 1,
        "bootstrap": False,
        "replication_max_queue_size": 100_000,
        "replication_max_queue_bytes": 64 * MIB,
        "replication_heartbeat_interval_secs": 10,
        "replication_heartbeat_timeout_secs": 30,
        "replication_reconnect_delay_secs": 30,
        "wal_receiver_enabled": False,
        "wal_receiver_bind_addr": "127.0.0.1:9291",
        "wal_segment_bytes": 64 * MIB,
        "wal_retention_bytes": 0,
        "wal_retention_hours": 168,
        "wal_keep_bytes": 10 * GIB,
        "max_frame_bytes": 16 * MIB,
        "kafka_bind_addr": "127.0.0.1:9092",
        "kafka_advertised_addr": "",
        "rack": "",
        "min_free_bytes": GIB,
        "http_bind_addr": "127.0.0.1:9644",
        "log_level": "info",
        "log_format": "console",
        "replication_tls_cert": None,
        "scrub_mb_per_sec": 8,
        "auto_create_topics": True,
        "default_partitions": 1,
        "insecure": False,
    }
    found = settings()
    assert {name: getattr(found, name) for name in expected} == expected
    assert load(MINIMUM, "follower").wal_receiver_enabled is True


def test_what_was_set_is_told_apart_from_what_was_not() -> None:
    found = settings(REPLICATION_MODE="async", RACK="")
    assert found.is_set("replication_mode")
    assert not found.is_set("replication_sync_replicas")
    assert not found.is_set("rack"), "empty is not set, as in an environment file"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("65536", 65536),
        ("64MiB", 64 * MIB),
        ("1.5 MiB", 3 * MIB // 2),
        ("64mib", 64 * MIB),
        ("100KB", 100_000),
        ("1GiB", GIB),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert settings(WAL_SEGMENT_BYTES=text).wal_segment_bytes == size


@given(st.integers(0, 1 << 60))
def test_a_size_is_read_as_it_is_shown(size: int) -> None:
    assert Size("").read(show_size(size)) == size


def test_seconds_may_have_decimals() -> None:
    assert settings(REPLICATION_HEARTBEAT_INTERVAL_SECS="0.25").replication_heartbeat_interval_secs == 0.25


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("NODE_ID", "0", "a whole number from 1"),
        ("NODE_ID", "two", "a whole number from 1"),
        ("WAL_SEGMENT_BYTES", "64 parsecs", "64MiB"),
        ("WAL_SEGMENT_BYTES", "1", "a size from 4KiB to 1GiB"),
        ("WAL_SEGMENT_BYTES", "-5", "64MiB"),
        ("REPLICATION_HEARTBEAT_INTERVAL_SECS", "nan", "seconds from"),
        ("REPLICATION_HEARTBEAT_INTERVAL_SECS", "inf", "seconds from"),
        ("REPLICATION_MODE", "semi", "async, sync"),
        ("BOOTSTRAP", "perhaps", "true or false"),
        ("REPLICATION_FOLLOWERS", "localhost", "host:port"),
        ("REPLICATION_FOLLOWERS", "localhost:1,localhost:1", "each address once"),
        ("REPLICATION_FOLLOWERS", "localhost:0", "neither port 0"),
        ("HTTP_BIND_ADDR", "::1:9644", "in brackets"),
        ("HTTP_BIND_ADDR", "127.0.0.1:70000", "not host:port"),
        ("KAFKA_ADVERTISED_ADDR", "0.0.0.0:9092", "nor a wildcard"),
        ("CLUSTER_ID", "my cluster", "A-Z"),
        ("LOG_LEVEL", "loud", "debug, info"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(name: str, value: str, says: str) -> None:
    message = refusal(**{name: value})
    assert f"CHRONIK_{name}={value}" in message
    assert says in message


def test_a_directory_that_is_a_file_is_told_from_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is a file. Name a directory" in refusal(DATA_DIR=str(tmp_path / "file"))


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"CHRONIK_LOG_LEVEL": "loud", "CHRONIK_NODEID": "1"}, "leader")
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    for part in ("CHRONIK_NODEID", "CHRONIK_NODE_ID is not set", "CHRONIK_DATA_DIR is not set", "CHRONIK_LOG_LEVEL"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("CHRONIK_REPLICATION_FOLOWERS", "CHRONIK_REPLICATION_FOLLOWERS"),
        ("CHRONIK_WAL_RETENTION_HOUR", "CHRONIK_WAL_RETENTION_HOURS"),
        ("CHRONIK_KAFKA_BIND", "CHRONIK_KAFKA_BIND_ADDR"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(typed: str, meant: str) -> None:
    message = refusal(**{typed.removeprefix("CHRONIK_"): "9644"})
    assert typed in message
    assert f"The nearest is {meant};" in message


def test_what_kubernetes_injects_is_ignored() -> None:
    injected = {
        "LEADER_SERVICE_HOST": "10.0.0.7",
        "LEADER_SERVICE_PORT": "9092",
        "LEADER_SERVICE_PORT_KAFKA": "9092",
        "LEADER_PORT": "tcp://10.0.0.7:9092",
        "LEADER_PORT_9092_TCP": "tcp://10.0.0.7:9092",
        "LEADER_PORT_9092_TCP_ADDR": "10.0.0.7",
        "LEADER_PORT_9092_TCP_PROTO": "tcp",
        "LEADER_PORT_9092_TCP_PORT": "9092",
    }
    assert settings(**injected) == settings()
    assert "CHRONIK_HTTP_PORT" in refusal(HTTP_PORT="9644"), "a person typed this one"


def test_other_peoples_variables_are_none_of_our_business() -> None:
    assert load(MINIMUM | {"PATH": "x", "CHRONIKLE": "y", "MY_CHRONIK_X": "z"}, "leader") == settings()


def test_the_timeout_is_longer_than_the_interval() -> None:
    assert "best three times as much" in refusal(REPLICATION_HEARTBEAT_TIMEOUT_SECS="10")


def test_two_doors_cannot_share_an_address() -> None:
    assert "CHRONIK_KAFKA_BIND_ADDR has that address" in refusal(HTTP_BIND_ADDR="127.0.0.1:9092")
    settings(HTTP_BIND_ADDR="127.0.0.1:0", KAFKA_BIND_ADDR="127.0.0.1:0")


class TestBeyondLoopback:
    """Nothing listens to strangers by accident."""

    @pytest.mark.parametrize(
        ("values", "asks_for"),
        [
            ({"HTTP_BIND_ADDR": "0.0.0.0:9644"}, "CHRONIK_HTTP_TLS_CERT"),
            ({"KAFKA_BIND_ADDR": "10.0.0.1:9092"}, "CHRONIK_KAFKA_TLS_CERT"),
            ({"KAFKA_BIND_ADDR": "10.0.0.1:9092"}, "CHRONIK_KAFKA_USERS_FILE"),
            ({"WAL_RECEIVER_BIND_ADDR": "[::]:9291", "WAL_RECEIVER_ENABLED": "true"}, "CHRONIK_REPLICATION_TLS_CERT"),
            ({"REPLICATION_FOLLOWERS": "node2:9291"}, "CHRONIK_REPLICATION_TLS_CERT"),
        ],
    )
    def test_is_refused_without_tls_unless_insecure_is_asked_for(self, values: dict[str, str], asks_for: str) -> None:
        assert asks_for in refusal(**values)
        settings(**values, INSECURE="true")

    def test_a_receiver_that_is_off_listens_to_nobody(self) -> None:
        settings(WAL_RECEIVER_BIND_ADDR="0.0.0.0:9291")

    def test_with_tls_and_users_all_is_well(self, tmp_path: Path) -> None:
        (tmp_path / "pem").touch()
        pem = str(tmp_path / "pem")
        settings(
            HTTP_BIND_ADDR="0.0.0.0:9644",
            HTTP_TLS_CERT=pem,
            HTTP_TLS_KEY=pem,
            KAFKA_BIND_ADDR="0.0.0.0:9092",
            KAFKA_ADVERTISED_ADDR="node1:9092",
            KAFKA_TLS_CERT=pem,
            KAFKA_TLS_KEY=pem,
            KAFKA_USERS_FILE=pem,
            REPLICATION_FOLLOWERS="node2:9291",
            REPLICATION_TLS_CERT=pem,
            REPLICATION_TLS_KEY=pem,
            REPLICATION_TLS_CA=pem,
        )

    def test_half_a_tls_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "pem").touch()
        message = refusal(REPLICATION_TLS_CERT=str(tmp_path / "pem"))
        assert "CHRONIK_REPLICATION_TLS_KEY and CHRONIK_REPLICATION_TLS_CA must be set too" in message

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        missing = str(tmp_path / "users")
        assert f"CHRONIK_KAFKA_USERS_FILE={missing}: cannot be read" in refusal(KAFKA_USERS_FILE=missing)

    def test_a_wildcard_is_no_address_for_clients(self) -> None:
        message = refusal(KAFKA_BIND_ADDR="0.0.0.0:9092", INSECURE="true")
        assert "CHRONIK_KAFKA_ADVERTISED_ADDR" in message


class TestCommand:
    """`chronik config`."""

    def test_shows_each_value_and_where_it_came_from(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "leader.env"
        file.write_text("# a leader\nCHRONIK_NODE_ID=7\nexport CHRONIK_DATA_DIR='d'\nCHRONIK_WAL_KEEP_BYTES=1GiB\n")
        assert main(["config", str(file), "--json"]) == 0
        rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["variables"]}
        assert set(rows) == {variable.name for variable in VARIABLES}
        assert (rows["CHRONIK_NODE_ID"]["value"], rows["CHRONIK_NODE_ID"]["from"]) == ("7", str(file))
        assert rows["CHRONIK_WAL_KEEP_BYTES"]["value"] == "1GiB"
        assert rows["CHRONIK_LOG_LEVEL"]["from"] == "default"

    def test_a_wrong_file_is_code_2_and_says_why(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "leader.env"
        file.write_text("CHRONIK_NODE_ID=7\nCHRONIK_DATA_DIR=d\nCHRONIK_LOG_LEVEL=loud\n")
        assert main(["config", str(file)]) == 2
        assert "CHRONIK_LOG_LEVEL=loud" in capsys.readouterr().err

    def test_a_line_that_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "x.env").write_text("CHRONIK_NODE_ID: 7\n")
        with pytest.raises(ConfigError, match=r"line 1"):
            read_file(tmp_path / "x.env")

    def test_the_document_is_the_table(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["config", "--markdown"]) == 0
        page = (Path(__file__).parent.parent / "docs" / "configuration.md").read_text()
        assert capsys.readouterr().out in page, "run: chronik config --markdown, and put it into docs/configuration.md"
