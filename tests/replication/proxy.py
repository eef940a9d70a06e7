"""A wire between two nodes that can be cut, in either direction, with both ends none the wiser."""

from __future__ import annotations

from contextlib import suppress

import trio


class Wire:
    """Listens, dials on, and passes bytes both ways. `forward`: from who dialled to who is dialled."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.address = ""
        self.forward = self.backward = True
        self.bytes_per_s = 0.0  # 0: as fast as it goes
        self.connections = 0
        self._changed = trio.Event()
        self._scopes: set[trio.CancelScope] = set()

    def cut(self, *, forward: bool = False, backward: bool = False) -> None:
        """Nothing passes any more (but in the directions given); the connections stay."""
        self.forward, self.backward = forward, backward

    def mend(self) -> None:
        self.forward = self.backward = True
        self._changed.set()
        self._changed = trio.Event()

    def reset(self) -> None:
        """Every connection dies."""
        for scope in list(self._scopes):
            scope.cancel()

    async def run(self, *, task_status: trio.TaskStatus[str]) -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.address = "{}:{}".format(*listeners[0].socket.getsockname())
        task_status.started(self.address)
        await trio.serve_listeners(self._serve, listeners)

    async def _serve(self, near: trio.SocketStream) -> None:
        host, port = self.target.rsplit(":", 1)
        with trio.CancelScope() as scope, suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            far = await trio.open_tcp_stream(host, int(port))
            self._scopes.add(scope)
            self.connections += 1
            async with near, far, trio.open_nursery() as nursery:
                nursery.start_soon(self._pass, near, far, "forward", nursery.cancel_scope)
                nursery.start_soon(self._pass, far, near, "backward", nursery.cancel_scope)
        self._scopes.discard(scope)

    async def _pass(
        self, source: trio.SocketStream, target: trio.SocketStream, way: str, scope: trio.CancelScope
    ) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while True:
                data = await source.receive_some(65536)
                while not getattr(self, way):  # held back, as a router's queue does; what comes later waits behind it
                    await self._changed.wait()
                if not data:
                    break
                if self.bytes_per_s:
                    await trio.sleep(len(data) / self.bytes_per_s)
                await target.send_all(data)
        scope.cancel()
