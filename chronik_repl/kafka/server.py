"""The Kafka door of a node: listens, lets clients in within the quotas, and gives each a connection of its own.

A client's death, malformed requests and broken promises end its connection with one line in the log; nothing that a
client sends ends the server. What does is a failed disk, and a bug.
"""

from __future__ import annotations

import errno
import socket
import ssl
from collections import Counter
from contextlib import ExitStack

import structlog
import trio

from chronik_repl.addresses import join_address, split_address
from chronik_repl.config import Settings
from chronik_repl.errors import ProtocolError
from chronik_repl.kafka.api import Apis
from chronik_repl.kafka.budget import Budget
from chronik_repl.kafka.connection import Connection, Shared, TooSlow
from chronik_repl.kafka.context import Client, Door, Limits
from chronik_repl.kafka.sasl import Logins
from chronik_repl.kafka.tls import client_context
from chronik_repl.kafka.wire import PlainWire, TlsWire, Wire
from chronik_repl.listening import listen
from chronik_repl.standing import House

logger = structlog.get_logger()

OUT_OF_FILES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}
OUT_OF_FILES_PAUSE_S = 0.1
COMPLAINTS_A_SECOND_MAX = 10
CROWDED_LOOK_S = 0.25


async def serve(
    house: House,
    settings: Settings,
    *,
    limits: Limits | None = None,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Until cancelled; started with the bound "host:port". Raises ConfigError, DiskFailed."""
    door = Door(house, settings, limits=limits)
    tls = await trio.to_thread.run_sync(client_context, settings)
    if settings.kafka_users_file is not None:
        door.logins = await Logins.open(settings.kafka_users_file)
    listeners = await listen("CHRONIK_KAFKA_BIND_ADDR", settings.kafka_bind_addr)
    with ExitStack() as stack:
        for listener in listeners:
            stack.callback(listener.close)
        host, _ = split_address(settings.kafka_bind_addr)
        bound = join_address(host, listeners[0].getsockname()[1])
        door.advertised = settings.kafka_advertised_addr or bound
        server = Server(door, tls)
        stack.callback(server.shared.poller.close)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.shared.poller.run)
            nursery.start_soon(server.apis.producing.run)
            nursery.start_soon(server.apis.fetching.run)
            nursery.start_soon(door.coordinator.run)
            nursery.start_soon(server.make_way, server.shared.receiving)
            nursery.start_soon(server.make_way, server.shared.sending)
            for listener in listeners:
                nursery.start_soon(server.accept, listener, nursery)
            task_status.started(bound)


class Server:
    def __init__(self, door: Door, tls: ssl.SSLContext | None = None) -> None:
        self._door = door
        self._tls = tls
        self._meters = door.meters
        self._hosts: Counter[str] = Counter()
        self._connections = 0
        self._complaints = Complaints()
        self.shared = Shared(door.limits, door.meters)
        self.apis = Apis(door, self.shared)

    async def accept(self, listener: socket.socket, nursery: trio.Nursery) -> None:
        while True:
            await trio.lowlevel.wait_readable(listener)
            try:
                sock, place = listener.accept()
            except (BlockingIOError, ConnectionError):
                continue
            except OSError as error:
                if error.errno not in OUT_OF_FILES:
                    raise
                logger.warning("cannot accept Kafka clients", error=str(error))
                await trio.sleep(OUT_OF_FILES_PAUSE_S)
                continue
            host = place[0]
            refused = self._refusal(host)
            if refused:
                sock.close()
                self._meters.add("kafka_connections_refused", 1, refused)
                logger.warning("a Kafka client was turned away", address=host, reason=refused)
                continue
            self._count(host, 1)
            self._meters.add("kafka_connections_opened")
            nursery.start_soon(self._serve, sock, host)

    def _refusal(self, host: str) -> str:
        limits = self._door.limits
        if self._connections >= limits.connections_max:
            return "too many connections"
        if self._hosts[host] >= limits.connections_a_host_max:
            return "too many connections of one address"
        return ""

    def _count(self, host: str, one: int) -> None:
        self._connections += one
        self._hosts[host] += one
        if not self._hosts[host]:
            del self._hosts[host]
        self._meters.set("kafka_connections", self._connections)

    async def _serve(self, sock: socket.socket, host: str) -> None:
        try:
            wire = await self._shake_hands(sock, host)
            if wire is not None:
                await self._converse(wire, Client(host))
        finally:
            sock.close()
            self._count(host, -1)

    async def _shake_hands(self, sock: socket.socket, host: str) -> Wire | None:
        if self._tls is None:
            return PlainWire(sock)
        reason = "the TLS handshake took too long"
        with trio.move_on_after(self._door.limits.unauthenticated_timeout_s):
            try:
                return await TlsWire.accept(sock, self._tls)
            except OSError as error:
                reason = str(error)
        self._meters.add("kafka_connections_refused", 1, "TLS")
        logger.info("no TLS with a Kafka client", address=host, reason=reason)
        return None

    async def _converse(self, wire: Wire, client: Client) -> None:
        client.authenticated = self._door.logins is None
        poller = self.shared.poller
        connection = Connection(wire, client, self.shared, polled=isinstance(wire, PlainWire))
        if isinstance(wire, PlainWire):
            poller.add(wire.fileno(), connection)
        self.shared.connections.add(connection)
        try:
            with connection.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write, connection)
                    await self._read(connection)
                    nursery.cancel_scope.cancel()
        finally:
            self.shared.connections.discard(connection)
            if isinstance(wire, PlainWire):
                poller.remove(wire.fileno())
            connection.closed()
            with trio.CancelScope(shield=True):
                await wire.close()

    async def make_way(self, budget: Budget) -> None:
        """While some wait for room, those who hold it for nothing lose it. Three clients that each announce a large
        request and send none of it must not stop all others for as long as a slow link may take."""
        while True:
            await budget.wait_crowded()
            await trio.sleep(CROWDED_LOOK_S)
            now = trio.current_time()
            for connection in list(self.shared.connections) if budget.crowded else ():
                if connection.hoards(budget, now):
                    self._meters.add("kafka_connections_refused", 1, "held room that others waited for")
                    self._complaints.about(connection.client, TooSlow("it held room that others waited for"))
                    connection.scope.cancel()

    async def _read(self, connection: Connection) -> None:
        try:
            await connection.read(self.apis)
        except OSError:
            pass  # the client is gone
        except ProtocolError as error:
            self._meters.add("kafka_malformed_requests")
            self._complaints.about(connection.client, error)

    async def _write(self, connection: Connection) -> None:
        try:
            await connection.write()
        except OSError:
            pass
        except ProtocolError as error:
            self._complaints.about(connection.client, error)
        connection.scope.cancel()


class Complaints:
    """A line in the log for each connection that was closed, but not so many that they fill the disk."""

    def __init__(self) -> None:
        self._second = 0
        self._lines = 0
        self._unsaid = 0

    def about(self, client: Client, error: ProtocolError) -> None:
        second = int(trio.current_time())
        if second != self._second:
            self._second, self._lines = second, 0
        self._lines += 1
        if self._lines > COMPLAINTS_A_SECOND_MAX:
            self._unsaid += 1
            return
        unsaid, self._unsaid = self._unsaid, 0
        more = {"and_before_it": f"{unsaid} more"} if unsaid else {}
        logger.warning(
            "a Kafka client's connection was closed",
            address=client.host,
            client=client.client_id,
            reason=str(error),
            **more,
        )
