"""The real network: TCP between nodes, with mutual TLS 1.3 where certificates are given.

Nagle is off (a coalesced send is already as large as it should be, and a small one must go at once). Buffers are
large, so that a follower that syncs does not stop the stream. Connections that are accepted are bounded; a peer that
does not finish its TLS handshake in time is dropped, and with TLS nothing of ours is read before both certificates
were checked against the cluster's CA. In TLS 1.3 a client's handshake succeeds even if the server then refuses its
certificate: a link is up only after the first answer of our own protocol.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable

import structlog
import trio

from chronik_repl.addresses import is_wildcard, join_address, split_address
from chronik_repl.errors import ConfigError
from chronik_repl.listening import for_trio, listen
from chronik_repl.replication.network import Stream
from chronik_repl.replication.streams import TcpStream
from chronik_repl.replication.tls import TlsStream

HANDSHAKE_TIMEOUT_S = 5.0
CONNECTIONS_MAX = 256
SOCKET_BUFFER_BYTES = 4 * 1024 * 1024

log = structlog.get_logger("chronik")


def tls_contexts(cert: str, key: str, ca: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """(for listening, for dialling). Both sides show a certificate; both check the other's against the cluster's CA."""
    contexts = []
    for purpose in (ssl.Purpose.CLIENT_AUTH, ssl.Purpose.SERVER_AUTH):
        context = ssl.create_default_context(purpose)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # who is who is said by directory ids; the CA says who belongs to the cluster
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(ca)
            context.load_cert_chain(cert, key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"CHRONIK_REPLICATION_TLS_CERT/_KEY/_CA: cannot use {cert!r}, {key!r}, {ca!r}: {error}. "
                "`chronik certs` makes a CA and certificates"
            ) from error
        contexts.append(context)
    server, client = contexts
    return server, client


class TcpNetwork:
    """Dials and listens on the machine's own network."""

    def __init__(self, tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None) -> None:
        self._server_tls = tls[0] if tls else None
        self._client_tls = tls[1] if tls else None

    async def dial(self, address: str) -> Stream:
        host, port = split_address(address)
        stream = _tuned(await trio.open_tcp_stream(host, port))
        if self._client_tls is None:
            return stream
        secured = TlsStream(stream, self._client_tls)
        try:
            await secured.do_handshake()
        except trio.BrokenResourceError as error:
            stream.close()
            raise OSError(
                f"TLS with {address} failed: {error.__cause__ or error}. Are both nodes' certificates of one CA, and "
                "neither has expired? (`chronik certs` makes them)"
            ) from error
        except BaseException:
            stream.close()
            raise
        return secured

    async def listen(
        self,
        address: str,
        handler: Callable[[Stream], Awaitable[object]],
        *,
        task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        host, _ = split_address(address)
        listeners = for_trio(await listen("CHRONIK_WAL_RECEIVER_BIND_ADDR", address))
        bound = listeners[0].socket.getsockname()
        room = trio.CapacityLimiter(CONNECTIONS_MAX)

        async def serve(accepted: trio.SocketStream) -> None:
            stream = _tuned(accepted)
            try:
                room.acquire_on_behalf_of_nowait(stream)
            except trio.WouldBlock:
                stream.close()
                return
            try:
                await self._serve(stream, handler)
            finally:
                room.release_on_behalf_of(stream)
                stream.close()

        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, serve, listeners)
            # Others cannot dial a wildcard: tell them this machine's name.
            task_status.started(join_address(socket.gethostname() if is_wildcard(host) else host, bound[1]))

    async def _serve(self, stream: TcpStream, handler: Callable[[Stream], Awaitable[object]]) -> None:
        served: Stream = stream
        if self._server_tls is not None:
            secured = TlsStream(stream, self._server_tls, server_side=True)
            failure = ""
            with trio.move_on_after(HANDSHAKE_TIMEOUT_S) as scope:
                try:
                    await secured.do_handshake()
                except trio.BrokenResourceError as error:
                    failure = str(error.__cause__ or error)
            if failure or scope.cancelled_caught:
                log.warning("a peer failed the TLS handshake", reason=failure or "too slow")
                return
            served = secured
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await handler(served)


def _tuned(accepted: trio.SocketStream) -> TcpStream:
    """The same connection, for large sends and receives."""
    sock = socket.socket(fileno=accepted.socket.detach())
    sock.setblocking(False)
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    return TcpStream(sock)
