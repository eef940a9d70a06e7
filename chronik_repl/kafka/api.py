"""The table of APIs, and what happens to a request: who answers it, or why it closes its connection.

The two hot ones are taken apart from the rest: Produce, which never waits here, and Fetch. Every other API is a row
of the table: decoded, handled in the connection's reading task, encoded, put into the connection's queue of answers.

An API or version that is not in the table closes the connection, as Kafka's does; but for ApiVersions, by which a
newer client finds out: it is answered in version 0, with UNSUPPORTED_VERSION and what version to ask in.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

from chronik_repl.errors import ProtocolError
from chronik_repl.kafka import (
    fetch,
    group_apis,
    group_offsets,
    metadata,
    offsets,
    one_batch,
    produce,
    producers,
    sasl,
    topics,
)
from chronik_repl.kafka.codec import (
    ApiKey,
    ApiVersionsResponse,
    decode_head,
    decode_request,
    encode_response,
)
from chronik_repl.kafka.codes import Code
from chronik_repl.kafka.connection import COUNTED, Connection, Shared
from chronik_repl.kafka.context import Api, Context, Door

PRODUCE, FETCH, API_VERSIONS = 0, 1, 18
API_VERSIONS_HIGHEST = 3


class Apis:
    """All that one server answers."""

    def __init__(self, door: Door, shared: Shared) -> None:
        self.producing = produce.Producing(door)
        self.fetching = fetch.Fetching(door, shared.sending)
        self._door = door
        self._receiving, self._sending = shared.receiving, shared.sending
        self._largest: defaultdict[int, int] = defaultdict(int)  # API → bytes of its largest answer
        self._meters = door.meters
        rows = (
            Api(API_VERSIONS, 0, API_VERSIONS_HIGHEST, self._api_versions, before_login=True),
            *metadata.APIS,
            *topics.APIS,
            *offsets.APIS,
            *group_apis.APIS,
            *group_offsets.APIS,
            *producers.APIS,
            *sasl.APIS,
        )
        self.table: dict[int, Api] = {int(row.key): row for row in rows}
        self.versions: dict[int, tuple[int, int]] = {
            PRODUCE: (produce.LOWEST, produce.HIGHEST),
            FETCH: (fetch.LOWEST, fetch.HIGHEST),
            **{key: (row.lowest, row.highest) for key, row in self.table.items()},
        }

    def take(self, connection: Connection, view: memoryview, held: int) -> None:
        """A Produce request of a client that may produce. Raises ProtocolError."""
        one = one_batch.read(view)
        if one is not None and self.producing.begin_one(connection, one, held):
            return
        try:
            head = decode_head(view)
            if not produce.LOWEST <= head.version <= produce.HIGHEST:
                raise ProtocolError(f"API Produce in version {head.version} is not spoken here")
            self.producing.begin(connection, head, view, held)
        except ProtocolError:
            self._receiving.give_back(held)
            raise

    async def answer(self, connection: Connection, view: memoryview, held: int) -> None:
        """Any other request. Raises ProtocolError."""
        self._receiving.give_back(held)
        head = decode_head(view)
        key, version = head.key, head.version
        begun_s = time.perf_counter()
        client = connection.client
        if not client.client_id:
            client.client_id = head.client_id[:256]
        lowest, highest = self.versions.get(key, (0, -1))
        if not lowest <= version <= highest:
            if key != API_VERSIONS:
                raise ProtocolError(f"API {_name(key)} in version {version} is not spoken here")
            told = self._told(Code.UNSUPPORTED_VERSION)
            connection.ready([encode_response(key, 0, head.correlation_id, told)])
            return
        if key == FETCH and client.authenticated:
            await self.fetching.handle(connection, head, view)
        else:
            row = self.table.get(key)
            if not client.authenticated and (row is None or not row.before_login):
                raise ProtocolError(f"{_name(key)} before the login")
            assert row is not None
            request = decode_request(key, version, view, head.body_at)
            held = 0

            async def room() -> None:
                nonlocal held
                held = await self._room_for(key)

            try:
                response = await row.handle(Context(self._door, client, room), version, request)
                if response is None:
                    raise ProtocolError(f"{_name(key)} closes the connection")
                encoded = encode_response(key, version, head.correlation_id, response)
                taken, held = held, 0
                connection.ready([encoded], taken)
            finally:
                self._sending.give_back(held)
            self._largest[key] = max(len(encoded), self._largest[key])
        name = _name(key)
        self._meters.add("kafka_requests", 1, name)
        self._meters.add("kafka_request_seconds", time.perf_counter() - begun_s, name)

    async def _room_for(self, key: int) -> int:
        """Taken from the sending budget: as much as the largest answer of this API needed until now, if that is worth
        the wait. One that turns out larger than any before is counted when it is there."""
        size = min(self._largest[key], self._door.limits.fetch_bytes_max)
        if size <= COUNTED:
            return 0
        await self._sending.take(size)
        return size

    async def _api_versions(self, context: Context, version: int, request: Any) -> Any:
        if version >= 3:
            context.client.software = f"{request.client_software_name} {request.client_software_version}"[:256]
        return self._told(Code.NONE)

    def _told(self, code: Code) -> Any:
        versions = self.versions if code is Code.NONE else {API_VERSIONS: self.versions[API_VERSIONS]}
        return ApiVersionsResponse(
            error_code=code,
            api_keys=[
                ApiVersionsResponse.ApiVersion(api_key=key, min_version=lowest, max_version=highest)
                for key, (lowest, highest) in sorted(versions.items())
            ],
            throttle_time_ms=0,
        )


def _name(key: int) -> str:
    try:
        return str(ApiKey(key).name)
    except ValueError:
        return str(key)
