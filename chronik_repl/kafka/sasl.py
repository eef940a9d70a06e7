"""Logging in at the Kafka door: SaslHandshake and SaslAuthenticate around scram.py.

A connection has one try. After a failed one it hears SASL_AUTHENTICATION_FAILED, the later the more its address has
failed lately, and everything else it sends closes it. What went wrong stands in our log; the client hears the same in
all cases.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import structlog
import trio

from chronik_repl.errors import ConfigError, ProtocolError
from chronik_repl.kafka.codec import SaslAuthenticateResponse, SaslHandshakeResponse
from chronik_repl.kafka.codes import Code
from chronik_repl.kafka.context import Api, Context
from chronik_repl.kafka.scram import Exchange, ScramFailed
from chronik_repl.kafka.users import MECHANISM, Users, read

logger = structlog.get_logger("chronik")

WRAPPED_SINCE = 1  # SaslHandshake: before it the exchange is bare bytes. Advertised, or librdkafka would not log in
DELAY_S, DELAY_S_MAX = 0.1, 5.0  # after a failure; doubled by each further one of the same address
FORGET_AFTER_S = 300.0
ADDRESSES_MAX = 10_000
FAILED = "SCRAM authentication failed"


class Logins:
    """The users as the file has them now, and who has failed lately."""

    def __init__(self, path: Path, users: Users, changed_ns: int) -> None:
        self._path = path
        self._users = users
        self._changed_ns = changed_ns
        self._failures: dict[str, tuple[int, float]] = {}  # address → how often, and when last; oldest first

    @classmethod
    async def open(cls, path: Path) -> Logins:
        """Raises ConfigError."""
        try:
            changed_ns = (await trio.Path(path).stat()).st_mtime_ns
        except OSError as error:
            raise ConfigError(
                f"CHRONIK_KAFKA_USERS_FILE={path}: {error.strerror}. Give a file that this user can read"
            ) from error
        return cls(path, await trio.to_thread.run_sync(read, path), changed_ns)

    async def users(self) -> Users:
        """Read again if the file has changed. A file that has become unreadable changes nothing."""
        try:
            changed_ns = (await trio.Path(self._path).stat()).st_mtime_ns
            if changed_ns != self._changed_ns:
                self._users = await trio.to_thread.run_sync(read, self._path)
                self._changed_ns = changed_ns
                logger.info("read the users file again", file=str(self._path), users=len(self._users.verifiers))
        except (OSError, ConfigError) as error:
            logger.warning("the users file cannot be read; going on with the users before", error=str(error))
        return self._users

    def delay_s(self, address: str) -> float:
        """Count a failure; how long its answer has to wait."""
        now = trio.current_time()
        times, last = self._failures.pop(address, (0, now))
        times = 1 if now - last > FORGET_AFTER_S else times + 1
        self._failures[address] = (times, now)
        if len(self._failures) > ADDRESSES_MAX:
            del self._failures[next(iter(self._failures))]
        return float(min(DELAY_S * 2 ** min(times - 1, 20), DELAY_S_MAX))


class _Over:
    """Takes the place of an exchange that has failed."""


async def sasl_handshake(context: Context, version: int, request: Any) -> Any:
    client, logins = context.client, context.door.logins
    if isinstance(client.sasl, _Over):
        raise ProtocolError("a request after a failed login")
    if logins is None or client.authenticated or version < WRAPPED_SINCE:
        return SaslHandshakeResponse(error_code=Code.ILLEGAL_SASL_STATE, mechanisms=[])
    if request.mechanism != MECHANISM:
        return SaslHandshakeResponse(error_code=Code.UNSUPPORTED_SASL_MECHANISM, mechanisms=[MECHANISM])
    client.sasl = Exchange(await logins.users())
    return SaslHandshakeResponse(error_code=Code.NONE, mechanisms=[MECHANISM])


async def sasl_authenticate(context: Context, version: int, request: Any) -> Any:
    client, logins = context.client, context.door.logins
    exchange = client.sasl
    if isinstance(exchange, _Over):
        raise ProtocolError("a request after a failed login")
    if logins is None or not isinstance(exchange, Exchange):
        return SaslAuthenticateResponse(
            error_code=Code.ILLEGAL_SASL_STATE, error_message="SaslHandshake comes first", auth_bytes=b""
        )
    message = bytes(request.auth_bytes)
    try:
        answer = exchange.final(message) if exchange.begun else exchange.first(message)
    except ScramFailed as why:
        client.sasl = _Over()
        context.door.meters.add("kafka_login_failures")
        logger.warning("login refused", address=client.host, user=exchange.name[:64], reason=str(why))
        await trio.sleep(logins.delay_s(client.host))
        return SaslAuthenticateResponse(
            error_code=Code.SASL_AUTHENTICATION_FAILED, error_message=FAILED, auth_bytes=b""
        )
    if exchange.proven:
        client.sasl = None
        client.principal = exchange.name
        client.authenticated = True
    return SaslAuthenticateResponse(error_code=Code.NONE, error_message=None, auth_bytes=answer)


APIS = (
    Api(17, 0, 1, sasl_handshake, before_login=True),
    Api(36, 0, 2, sasl_authenticate, before_login=True),
)
