"""The HTTP door: read-only, for people and machines that watch.

    /            the page
    /healthz     200 while the process works
    /readyz      200 when it may be given work: a leader that leads, a follower that listens; otherwise 503 and why
    /status      where the node stands, as JSON (standing.Status)
    /history     the last ten minutes, a sample a second (?since=milliseconds)
    /topics      topics and partitions, /groups consumer groups, as JSON
    /metrics     for Prometheus

Nothing here changes anything: commands go through control.sock. So /status and /history may be read by a page that came
from another node: that is how a follower's page shows the leader's view.
"""

from __future__ import annotations

import importlib.resources
import time
from collections.abc import Awaitable, Callable

import msgspec
import trio
from hypercorn.config import Config
from hypercorn.trio.run import worker_serve
from hypercorn.utils import wrap_app
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from chronik_repl import tables
from chronik_repl.addresses import join_address, split_address
from chronik_repl.config import Settings
from chronik_repl.errors import ConfigError
from chronik_repl.http import metrics
from chronik_repl.http.history import INTERVAL_S, History
from chronik_repl.standing import House

PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self' http: https:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {
    "Content-Security-Policy": PAGE_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
ANYONE = {"Access-Control-Allow-Origin": "*", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
CONNECTIONS_BACKLOG = 100


async def serve(
    house: House, settings: Settings, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED
) -> None:
    """Until cancelled; started with the bound "host:port". Raises ConfigError if it cannot bind."""
    config = Config()
    config.bind = [settings.http_bind_addr]
    config.loglevel = "WARNING"
    config.accesslog = None
    config.errorlog = None
    config.backlog = CONNECTIONS_BACKLOG
    config.keep_alive_timeout = 15
    config.read_timeout = 30
    config.graceful_timeout = 0.5
    config.h11_max_incomplete_size = 16 * 1024
    config.include_server_header = False
    if settings.http_tls_cert and settings.http_tls_key:
        config.certfile, config.keyfile = str(settings.http_tls_cert), str(settings.http_tls_key)
    host, _ = split_address(settings.http_bind_addr)
    try:
        sockets = config.create_sockets()
        bound = sockets.secure_sockets + sockets.insecure_sockets
        for socket in bound:
            socket.listen(CONNECTIONS_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"CHRONIK_HTTP_BIND_ADDR={settings.http_bind_addr}: {error.strerror or error}. Choose another port or "
            f"host, or end the program that has it."
        ) from error
    history = History()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_remember, house, history)
        app = wrap_app(application(house, history), config.wsgi_max_body_size, "asgi")  # type: ignore[arg-type]
        nursery.start_soon(_run, app, config, sockets)
        task_status.started(join_address(host, bound[0].getsockname()[1]))


async def _run(app: object, config: Config, sockets: object) -> None:
    await worker_serve(app, config, sockets=sockets)  # type: ignore[arg-type]


async def _remember(house: House, history: History) -> None:
    while True:
        history.take(house.status(), time.time_ns() // 1_000_000)
        await trio.sleep(INTERVAL_S)


def application(house: House, history: History) -> Starlette:
    page_text = importlib.resources.files("chronik_repl.http").joinpath("page.html").read_bytes()

    async def page(request: Request) -> Response:
        return Response(page_text, media_type="text/html", headers=PAGE_HEADERS)

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        if house.ready:
            return PlainTextResponse(f"ready: {house.role} in epoch {house.epoch}\n")
        return PlainTextResponse(f"not ready: {house.role}\n", status_code=503)

    async def status(request: Request) -> Response:
        return _json(house.status())

    async def past(request: Request) -> Response:
        since = request.query_params.get("since", "0")
        if not since.isascii() or not since.isdigit():
            return PlainTextResponse("since is a time in milliseconds\n", status_code=400)
        return _json(history.since(int(since)))

    async def topics(request: Request) -> Response:
        return _json(tables.topics(house))

    async def groups(request: Request) -> Response:
        return _json(tables.groups(house))

    async def scrape(request: Request) -> Response:
        return Response(metrics.render(house), media_type=metrics.CONTENT_TYPE)

    doors: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/": page,
        "/healthz": healthz,
        "/readyz": readyz,
        "/status": status,
        "/history": past,
        "/topics": topics,
        "/groups": groups,
        "/metrics": scrape,
    }
    return Starlette(routes=[Route(path, answer, methods=["GET"]) for path, answer in doors.items()])


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json", headers=ANYONE)
