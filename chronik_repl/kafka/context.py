"""What a handler of the Kafka door may know: the door (one a server) and the client (one a connection).

A handler answers one API:

    async def handle(context: Context, version: int, request: Any) -> Any

`request` is the decoded message of codec.py, checked: no field that Kafka says is there is None. The answer is the
API's response of codec.py; dispatch encodes it in the request's version. None closes the connection without an answer.
A handler runs in its connection's reading task, so a connection's requests are handled one after another: one that
waits holds up that client alone. Only Produce is pipelined (produce.py), which is no handler in this sense.

One whose answer may be large calls `await context.room()` once, when it has waited for all that it waits for and before
it makes the answer: until others have taken theirs there may be no room for one more.

A handler raises nothing but ProtocolError (the connection is closed, with a line in the log) and what its promise to
the process is (DiskFailed). What Kafka has a code for is answered with that code (errors of this package → codes: see
`error_code` in codes.py).

Modules that answer APIs export `APIS: tuple[Api, ...]`; api.py joins them into the one table that is also what
ApiVersions tells.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import trio

from chronik_repl.errors import NotLeader
from chronik_repl.kafka.coordinator import Coordinator
from chronik_repl.kafka.producer_ids import Ids
from chronik_repl.positions import Position
from chronik_repl.standing import House

if TYPE_CHECKING:
    from chronik_repl.config import Settings
    from chronik_repl.kafka.sasl import Logins

KIB, MIB = 1024, 1024 * 1024


class Limits(msgspec.Struct, frozen=True):
    """A limit on everything that a client could otherwise make grow."""

    connections_max: int = 2000
    connections_a_host_max: int = 1000
    request_bytes_max: int = 100 * MIB  # of one Produce request; the log's frame limit holds for each batch in it
    small_request_bytes_max: int = MIB  # of every other request
    unauthenticated_bytes_max: int = 64 * KIB  # of any request before the login
    request_timeout_s: float = 30.0  # from a request's first byte to its last
    idle_timeout_s: float = 600.0  # without any request
    unauthenticated_timeout_s: float = 10.0  # from the connection to the end of TLS and SASL
    send_timeout_s: float = 60.0  # a client that takes nothing for so long is dropped
    receiving_bytes_max: int = 128 * MIB  # of all connections: large requests that are read, produced ones unanswered
    pipelined_bytes_max: int = 64 * MIB  # of one connection: produced, not yet answered
    pipelined_requests_max: int = 1000  # of one connection
    fetch_bytes_max: int = 8 * MIB  # of one answer (one batch may be larger)
    unsent_bytes_max: int = 8 * MIB  # of one connection: answered, and behind a produce that is not
    sending_bytes_max: int = 128 * MIB  # of all connections: answered, not yet sent
    waiting_fetches_max: int = 2000
    crowded_patience_s: float = 1.0  # while others wait for room: a client that holds some has so long,
    crowded_bytes_a_second_min: int = MIB  # and after that must send or read at least so much


class Door:
    """One Kafka server: what all of its connections share."""

    def __init__(self, house: House, settings: Settings, *, limits: Limits | None = None) -> None:
        self.house = house
        self.settings = settings
        half = settings.kafka_max_inflight_bytes // 2
        self.limits = limits or Limits(
            connections_max=settings.kafka_max_connections, receiving_bytes_max=half, sending_bytes_max=half
        )
        self.meters = house.meters
        self.coordinator = Coordinator(house)
        self.producer_ids = Ids(house)
        self.logins: Logins | None = None  # set where clients must log in
        self.advertised = ""  # "host:port", once bound

    async def committed(self, end: Position, timeout_s: float) -> bool:
        """Wait until `end` is below the high watermark; False when that took too long. Raises NotLeader if deposed."""
        house = self.house
        if house.log.committed.value >= end:
            return True
        epoch = house.epoch
        with trio.move_on_after(timeout_s) as scope:
            await house.log.committed.wait(end)
        if house.epoch != epoch:  # what passed `end` may be the next leader's
            raise NotLeader("the leadership ended meanwhile")
        return not scope.cancelled_caught


class Client:
    """One connection, as handlers see it. sasl.py sets `principal`; nobody else writes here."""

    __slots__ = ("authenticated", "client_id", "host", "principal", "sasl", "software")

    def __init__(self, host: str) -> None:
        self.host = host  # "127.0.0.1"
        self.client_id = ""
        self.software = ""  # "librdkafka 2.3", from ApiVersions
        self.principal = ""  # the SASL user, once authenticated
        self.authenticated = False
        self.sasl: object | None = None  # the exchange under way; sasl.py's


class Context(NamedTuple):
    """Given to every handler."""

    door: Door
    client: Client
    room: Callable[[], Awaitable[None]]

    @property
    def house(self) -> House:
        return self.door.house


Handler = Callable[[Context, int, Any], Awaitable[Any]]


class Api(NamedTuple):
    """A row of the table: the versions that are advertised and answered, and by whom."""

    key: int
    lowest: int
    highest: int
    handle: Handler
    before_login: bool = False  # may be asked by a client that has not authenticated
