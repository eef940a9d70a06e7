"""Who gets in at the door and who does not: TLS, client certificates, SCRAM, and what comes after a failed try."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from chronik_repl import certs
from chronik_repl.addresses import split_address
from chronik_repl.errors import ConfigError
from chronik_repl.kafka import codec, sasl
from chronik_repl.kafka.codes import Code
from chronik_repl.kafka.sasl import Logins
from chronik_repl.kafka.users import Users, Verifier, read, write
from tests.kafka.client import Closed, KafkaClient, connect
from tests.kafka.house import open_door
from tests.kafka.test_scram import Client

DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("login")
    certs.make(folder, ["kafka", "client"], hosts=["127.0.0.1", "localhost"])
    write(folder / "users", Users(b"secret", {"alice": Verifier.make("wonder", iterations=4096)}))
    return folder


@asynccontextmanager
async def connect_tls(address: str, context: ssl.SSLContext) -> AsyncIterator[KafkaClient]:
    host, port = split_address(address)
    stream = trio.SSLStream(
        await trio.open_tcp_stream(host, port), context, server_hostname=host, https_compatible=True
    )
    try:
        yield KafkaClient(stream)  # type: ignore[arg-type]
    finally:
        await trio.aclose_forcefully(stream)


def handshake(mechanism: str = "SCRAM-SHA-256") -> Any:
    return codec.SaslHandshakeRequest(mechanism=mechanism)


def authenticate(message: bytes) -> Any:
    return codec.SaslAuthenticateRequest(auth_bytes=message)


async def log_in(client: KafkaClient, user: str, password: str) -> Any:
    assert (await client.ask(handshake(), 1)).error_code == Code.NONE
    scram = Client(user, password)
    told = await client.ask(authenticate(scram.first()), 2)
    assert told.error_code == Code.NONE
    return await client.ask(authenticate(scram.final(bytes(told.auth_bytes))), 2)


async def test_a_client_certificate_is_asked_for_where_a_ca_is_named(tmp_path: Path, folder: Path) -> None:
    settings: dict[str, Any] = {f"kafka_tls_{name}": folder / file for name, file in TLS.items()}
    with trio.fail_after(DEADLINE_S):
        async with open_door(tmp_path, **settings) as (_, address):
            context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
            context.load_cert_chain(folder / "client.pem", folder / "client.key")
            async with connect_tls(address, context) as client:
                assert (await client.ask(codec.ApiVersionsRequest(), 0)).error_code == Code.NONE
            nobody = ssl.create_default_context(cafile=str(folder / "ca.pem"))
            async with connect_tls(address, nobody) as client:
                with pytest.raises((trio.BrokenResourceError, Closed)):
                    await client.ask(codec.ApiVersionsRequest(), 0)
            async with connect_tls(address, context) as client:  # and the server lives
                assert (await client.ask(codec.ApiVersionsRequest(), 0)).error_code == Code.NONE


TLS = {"cert": "kafka.pem", "key": "kafka.key", "ca": "ca.pem"}


async def test_files_that_are_no_certificates_are_named(tmp_path: Path, folder: Path) -> None:
    for name, variable in (("cert", "CHRONIK_KAFKA_TLS_CERT"), ("ca", "CHRONIK_KAFKA_TLS_CA")):
        settings: dict[str, Any] = {f"kafka_tls_{key}": folder / file for key, file in TLS.items()} | {
            f"kafka_tls_{name}": folder / "users"
        }
        with trio.fail_after(DEADLINE_S), pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match=variable)):
            async with open_door(tmp_path / name, **settings):
                pass


async def test_before_the_login_nothing_but_the_login(tmp_path: Path, folder: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_door(tmp_path, kafka_users_file=folder / "users") as (_, address):
            async with connect(address) as client:
                assert (await client.ask(codec.ApiVersionsRequest(), 0)).error_code == Code.NONE
                told = await client.ask(authenticate(b"n,,n=alice,r=x"), 2)
                assert told.error_code == Code.ILLEGAL_SASL_STATE
                told = await client.ask(handshake("PLAIN"), 1)
                assert (told.error_code, told.mechanisms) == (Code.UNSUPPORTED_SASL_MECHANISM, ["SCRAM-SHA-256"])
                assert (await client.ask(handshake(), 0)).error_code == Code.ILLEGAL_SASL_STATE
                told = await log_in(client, "alice", "wonder")
                assert (told.error_code, bytes(told.auth_bytes)[:2]) == (Code.NONE, b"v=")
                assert (await client.metadata()).controller_id == 1
                assert (await client.ask(handshake(), 1)).error_code == Code.ILLEGAL_SASL_STATE
            for early in (codec.MetadataRequest(topics=None), codec.ListGroupsRequest(), codec.HeartbeatRequest()):
                async with connect(address) as client:
                    await client.send(early, 1)
                    assert await client.closed()
            async with connect(address) as client:
                await client.send(client.produce_request("t", b"x"), 9)
                assert await client.closed()


async def test_one_try_a_connection(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sasl, "DELAY_S", 0.01)
    with trio.fail_after(DEADLINE_S):
        async with open_door(tmp_path, kafka_users_file=folder / "users") as (house, address):
            heard = []
            for user, password in (("alice", "wrong"), ("nobody", "wonder")):
                async with connect(address) as client:
                    told = await log_in(client, user, password)
                    heard.append((told.error_code, told.error_message, bytes(told.auth_bytes)))
                    await client.send(handshake(), 1)
                    assert await client.closed()
            assert heard == [(Code.SASL_AUTHENTICATION_FAILED, sasl.FAILED, b"")] * 2
            assert house.meters.values["kafka_login_failures"] == {(): 2}


async def test_without_users_there_is_nothing_to_log_in_to(tmp_path: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_door(tmp_path) as (_, address), connect(address) as client:
            assert (await client.ask(handshake(), 1)).error_code == Code.ILLEGAL_SASL_STATE


async def test_failures_of_an_address_are_answered_later_and_later(
    tmp_path: Path, folder: Path, autojump_clock: trio.testing.MockClock
) -> None:
    logins = Logins(folder / "users", read(folder / "users"), 0)
    delays = [logins.delay_s("10.0.0.1") for _ in range(8)]
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert logins.delay_s("10.0.0.2") == 0.1
    await trio.sleep(sasl.FORGET_AFTER_S + 1)
    assert logins.delay_s("10.0.0.1") == 0.1
    for number in range(sasl.ADDRESSES_MAX + 10):
        logins.delay_s(f"host-{number}")
    assert len(logins._failures) == sasl.ADDRESSES_MAX


async def test_a_users_file_that_becomes_unreadable_locks_nobody_out(tmp_path: Path, folder: Path) -> None:
    file = tmp_path / "users"
    write(file, read(folder / "users"))
    logins = await Logins.open(file)
    file.write_text("nonsense")
    assert "alice" in (await logins.users()).verifiers
    write(file, Users(b"secret", {}))
    assert (await logins.users()).verifiers == {}
    file.unlink()
    assert (await logins.users()).verifiers == {}
    with pytest.raises(ConfigError, match="CHRONIK_KAFKA_USERS_FILE"):
        await Logins.open(file)
