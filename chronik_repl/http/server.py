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
import ssl
import time
from collections.abc import Callable
from urllib.parse import parse_qsl

import msgspec
import trio

from chronik_repl import tables
from chronik_repl.addresses import join_address, split_address
from chronik_repl.config import Settings
from chronik_repl.errors import ConfigError
from chronik_repl.http import metrics
from chronik_repl.http.conversation import Answer, Conversations, Limits
from chronik_repl.http.history import INTERVAL_S, History
from chronik_repl.listening import for_trio, listen
from chronik_repl.standing import House

PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self' http: https:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {"Content-Security-Policy": PAGE_POLICY, "Cache-Control": "no-cache"}
ANYONE = {"Access-Control-Allow-Origin": "*", "Cache-Control": "no-store"}
TIME_DIGITS_MAX = 18


async def serve(
    house: House,
    settings: Settings,
    *,
    limits: Limits | None = None,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Until cancelled; started with the bound "host:port". Raises ConfigError if it cannot bind."""
    tls = server_context(settings)
    listeners = for_trio(await listen("CHRONIK_HTTP_BIND_ADDR", settings.http_bind_addr))
    history = History()
    conversations = Conversations(Doors(house, history).get, limits or Limits(), house.meters)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_remember, house, history)
        nursery.start_soon(conversations.serve, listeners, tls)
        host, _ = split_address(settings.http_bind_addr)
        task_status.started(join_address(host, listeners[0].socket.getsockname()[1]))


def server_context(settings: Settings) -> ssl.SSLContext | None:
    """None: no TLS. Raises ConfigError when a file cannot be used."""
    cert, key = settings.http_tls_cert, settings.http_tls_key
    if cert is None or key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"CHRONIK_HTTP_TLS_CERT={cert}, CHRONIK_HTTP_TLS_KEY={key}: not a certificate and its key in PEM "
            f"({error}). Name two files such as `chronik certs` makes"
        ) from error
    return context


async def _remember(house: House, history: History) -> None:
    while True:
        history.take(house.status(), time.time_ns() // 1_000_000)
        await trio.sleep(INTERVAL_S)


class Doors:
    """What stands behind each path."""

    def __init__(self, house: House, history: History) -> None:
        self._house = house
        self._history = history
        self._page = importlib.resources.files("chronik_repl.http").joinpath("page.html").read_bytes()
        self._doors: dict[str, Callable[[dict[str, str]], Answer]] = {
            "/": lambda _: Answer(200, self._page, "text/html; charset=utf-8", PAGE_HEADERS),
            "/healthz": lambda _: Answer(200, b"ok\n"),
            "/readyz": self._ready,
            "/status": lambda _: _json(house.status()),
            "/history": self._past,
            "/topics": lambda _: _json(tables.topics(house)),
            "/groups": lambda _: _json(tables.groups(house)),
            "/metrics": lambda _: Answer(200, metrics.render(house), metrics.CONTENT_TYPE),
        }

    def get(self, target: str) -> Answer:
        path, _, query = target.partition("?")
        door = self._doors.get(path)
        if door is None:
            return Answer(404, f"there is nothing here but {' '.join(self._doors)}\n".encode())
        return door(dict(parse_qsl(query)))

    def _ready(self, query: dict[str, str]) -> Answer:
        if self._house.ready:
            return Answer(200, f"ready: {self._house.role} in epoch {self._house.epoch}\n".encode())
        return Answer(503, f"not ready: {self._house.role}\n".encode())

    def _past(self, query: dict[str, str]) -> Answer:
        since = query.get("since", "0")
        if not since.isascii() or not since.isdigit() or len(since) > TIME_DIGITS_MAX:
            return Answer(400, b"since is a time in milliseconds\n")
        return _json(self._history.since(int(since)))


def _json(value: object) -> Answer:
    return Answer(200, msgspec.json.encode(value), "application/json", ANYONE)
