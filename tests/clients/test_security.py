"""TLS and SCRAM with every client, and what those hear who may not come in."""

from __future__ import annotations

import asyncio
import io
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from confluent_kafka import KafkaError, Producer
from kafka import KafkaProducer
from kafka.errors import KafkaError as PythonKafkaError

from chronik_repl import certs
from chronik_repl.cli import main
from tests.clients.cluster import Cluster
from tests.clients.test_confluent import consume, produce

USER, PASSWORD = "alice", "correct-horse"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secure")
    certs.make(folder, ["kafka", "client"], hosts=["127.0.0.1", "localhost"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.StringIO(PASSWORD + "\n"))
        assert main(["users", "add", USER, "--file", str(folder / "users"), "--password-stdin"]) == 0
    return folder


@pytest.fixture(scope="module")
def secure(folder: Path) -> Iterator[Cluster]:
    cluster = Cluster(
        folder,
        followers=0,
        KAFKA_TLS_CERT=str(folder / "kafka.pem"),
        KAFKA_TLS_KEY=str(folder / "kafka.key"),
        KAFKA_USERS_FILE=str(folder / "users"),
    )
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def librdkafka(folder: Path, password: str = PASSWORD, user: str = USER) -> dict[str, Any]:
    return {
        "security.protocol": "SASL_SSL", "ssl.ca.location": str(folder / "ca.pem"),
        "sasl.mechanism": "SCRAM-SHA-256", "sasl.username": user, "sasl.password": password,
    }  # fmt: skip


def test_librdkafka(secure: Cluster, folder: Path, fresh: Callable[[str], str]) -> None:
    topic = fresh("secure")
    ledger = produce(secure, topic, 2000, **(librdkafka(folder) | {"enable.idempotence": True}))
    consume(secure, topic, ledger, **librdkafka(folder))
    ledger.once_and_in_order()
    assert ledger.complete(2000)


def refusal(secure: Cluster, config: dict[str, Any]) -> list[KafkaError]:
    """What a client hears that never gets in."""
    heard: list[KafkaError] = []
    producer = Producer({"bootstrap.servers": secure.bootstrap, "error_cb": heard.append, "log_level": 0, **config})
    for _ in range(200):
        producer.poll(0.1)
        if any(error.code() == KafkaError._AUTHENTICATION for error in heard):
            break
    return [error for error in heard if error.code() == KafkaError._AUTHENTICATION]


def test_a_wrong_password_and_an_unknown_user_hear_the_same(secure: Cluster, folder: Path) -> None:
    before = sum(v for k, v in secure.leader.metrics().items() if k.startswith("chronik_kafka_login_failures"))
    wrong = refusal(secure, librdkafka(folder, password="wrong"))
    unknown = refusal(secure, librdkafka(folder, user="nobody"))
    assert len(wrong) == len(unknown) == 1
    said = [error.str().split("SASL", 1)[-1].split("(after", 1)[0] for error in (wrong[0], unknown[0])]
    assert said[0] == said[1]
    after = sum(v for k, v in secure.leader.metrics().items() if k.startswith("chronik_kafka_login_failures"))
    assert after >= before + 2


def test_a_user_that_was_added_or_removed_while_the_server_runs(
    secure: Cluster, folder: Path, fresh: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal(secure, librdkafka(folder, user="bob", password="bobs"))
    monkeypatch.setattr("sys.stdin", io.StringIO("bobs\n"))
    assert main(["users", "add", "bob", "--file", str(folder / "users"), "--password-stdin"]) == 0
    assert len(produce(secure, fresh("secure"), 10, **librdkafka(folder, user="bob", password="bobs")).acked) == 10
    assert main(["users", "remove", "bob", "--file", str(folder / "users")]) == 0
    assert refusal(secure, librdkafka(folder, user="bob", password="bobs"))


def test_kafka_python(secure: Cluster, folder: Path, fresh: Callable[[str], str]) -> None:
    config: dict[str, Any] = {
        "bootstrap_servers": secure.bootstrap, "security_protocol": "SASL_SSL", "ssl_cafile": str(folder / "ca.pem"),
        "sasl_mechanism": "SCRAM-SHA-256", "sasl_plain_username": USER, "max_block_ms": 10_000,
    }  # fmt: skip
    with KafkaProducer(**config, sasl_plain_password=PASSWORD) as producer:
        assert producer.send(fresh("secure"), b"x").get(20).offset == 0
    with pytest.raises(PythonKafkaError):
        KafkaProducer(**config, sasl_plain_password="wrong", bootstrap_timeout_ms=2000).send("t", b"x").get(10)


def test_aiokafka(secure: Cluster, folder: Path, fresh: Callable[[str], str]) -> None:
    async def send() -> int:
        async with AIOKafkaProducer(
            bootstrap_servers=secure.bootstrap, security_protocol="SASL_SSL",
            ssl_context=ssl.create_default_context(cafile=str(folder / "ca.pem")), sasl_mechanism="SCRAM-SHA-256",
            sasl_plain_username=USER, sasl_plain_password=PASSWORD,
        ) as producer:  # fmt: skip
            return int((await producer.send_and_wait(fresh("secure"), b"x")).offset)

    assert asyncio.run(send()) == 0


@pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed (apt-get install kcat)")
def test_kcat(secure: Cluster, folder: Path, fresh: Callable[[str], str]) -> None:
    options = [part for name, value in librdkafka(folder).items() for part in ("-X", f"{name}={value}")]
    command = ["kcat", "-b", secure.bootstrap, "-t", fresh("secure"), *options]
    subprocess.run([*command, "-P"], input=b"one\n", check=True, timeout=30)
    read = subprocess.run([*command, "-C", "-e", "-q"], check=True, timeout=30, capture_output=True)
    assert read.stdout == b"one\n"


def test_who_speaks_no_tls_or_does_not_log_in_is_closed(secure: Cluster, folder: Path) -> None:
    host, port = secure.leader.kafka.split(":")
    metadata = b"\0\0\0\x11\0\x03\0\0\0\0\0\1\0\3abc\0\0\0\0"
    with socket.create_connection((host, int(port)), timeout=10) as plain:
        plain.sendall(metadata)
        assert not answered(plain)
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    with (
        socket.create_connection((host, int(port)), timeout=10) as sock,
        context.wrap_socket(sock, server_hostname=host) as wrapped,
    ):
        wrapped.sendall(metadata)  # before the login
        assert not answered(wrapped)
    assert secure.leader.get("/readyz")


def answered(sock: socket.socket) -> bool:
    """Whether anything but a TLS alert comes back before the connection ends."""
    try:
        first = sock.recv(1)
    except OSError:
        return False
    return first not in (b"", b"\x15")
