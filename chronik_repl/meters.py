"""What the front doors count, for /metrics: plain numbers under names that stand in one table.

A door adds to a counter or sets a gauge; the HTTP door reads them all. The node owns the `Meters`, one a process.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Meter(NamedTuple):
    kind: Literal["counter", "gauge"]
    meaning: str
    labels: tuple[str, ...] = ()


METERS = {
    "kafka_connections": Meter("gauge", "Kafka clients connected now."),
    "kafka_connections_opened": Meter("counter", "Kafka connections accepted."),
    "kafka_connections_refused": Meter("counter", "Kafka connections closed on arrival or by a limit.", ("reason",)),
    "kafka_requests": Meter("counter", "Requests answered.", ("api",)),
    "kafka_request_seconds": Meter("counter", "Time from a request's last byte to its answer, summed.", ("api",)),
    "kafka_errors": Meter("counter", "Errors answered, by Kafka's name for them.", ("api", "error")),
    "kafka_malformed_requests": Meter("counter", "Requests that made no sense; their connections were closed."),
    "kafka_received_bytes": Meter("counter", "Bytes read from Kafka clients."),
    "kafka_sent_bytes": Meter("counter", "Bytes sent to Kafka clients."),
    "kafka_produced_batches": Meter("counter", "Record batches appended."),
    "kafka_produced_records": Meter("counter", "Records appended."),
    "kafka_produced_bytes": Meter("counter", "Bytes of record batches appended."),
    "kafka_duplicate_batches": Meter("counter", "Batches that were there already and were answered again."),
    "kafka_fetched_batches": Meter("counter", "Record batches given to consumers by this node."),
    "kafka_fetched_bytes": Meter("counter", "Bytes of record batches given to consumers by this node."),
    "kafka_inflight_bytes": Meter("gauge", "Bytes of requests and answers held in memory."),
    "kafka_login_failures": Meter("counter", "SASL logins refused."),
    "kafka_group_rebalances": Meter("counter", "Generations that consumer groups began."),
    "http_connections": Meter("gauge", "HTTP clients connected now."),
    "http_connections_dropped": Meter("counter", "HTTP connections closed by a limit.", ("reason",)),
    "http_requests": Meter("counter", "HTTP requests answered, by status.", ("status",)),
}


class Meters:
    """A name that is not in the table is a bug, and a KeyError."""

    def __init__(self) -> None:
        self.values: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in METERS}

    def add(self, name: str, amount: float = 1, *labels: str) -> None:
        values = self.values[name]
        values[labels] = values.get(labels, 0) + amount

    def set(self, name: str, value: float, *labels: str) -> None:
        self.values[name][labels] = value
