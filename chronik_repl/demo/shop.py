"""A small shop: customers order, and every order is produced to the topic `orders` through librdkafka, acks=all.

It remembers which orders were acked. Afterwards it reads the topic as any consumer would, and says whether each of
them is there, once and in order.
"""

from __future__ import annotations

import json
import random
import threading
import time
from functools import partial
from typing import Any

TOPIC = "orders"
PRODUCTS = {"tea": 4.50, "bread": 3.20, "lamp": 39.00, "chair": 89.00, "book": 14.90, "kettle": 29.90, "rug": 120.00}
CUSTOMERS = 500
TICK_S = 0.02
READ_TIMEOUT_S = 60.0


class Shop:
    """Open it, let it run, `close` it: a thread of its own."""

    def __init__(self, bootstrap: str, orders_per_s: int) -> None:
        self._bootstrap = bootstrap
        self._orders_a_tick = max(1, int(orders_per_s * TICK_S))
        self._chance = random.Random(7)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.ordered = 0
        self.acked = 0
        self.failed = 0
        self.revenue = 0.0
        self._acked_until: dict[int, int] = {}  # partition → offset of the last acked order
        self._remembered: set[int] | None = set()  # the acked orders; forgotten once they were checked

    def open(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Take no more orders, and wait until every one has been answered."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        from confluent_kafka import Producer

        producer = Producer(
            {
                "bootstrap.servers": self._bootstrap,
                "acks": "all",
                "enable.idempotence": True,
                "compression.type": "lz4",
                "linger.ms": 5,
                "client.id": "shop",
                "log_level": 2,  # a killed node is part of the story
            }
        )
        due = time.monotonic()
        while not self._closing.is_set():
            for _ in range(self._orders_a_tick):
                order = self._order()
                answered = partial(self._answered, order["order"])
                producer.produce(TOPIC, json.dumps(order), key=order["customer"], on_delivery=answered)
            producer.poll(0)
            due += TICK_S
            self._closing.wait(max(0.0, due - time.monotonic()))
        producer.flush(30)

    def _order(self) -> dict[str, Any]:
        self.ordered += 1
        product = self._chance.choice(list(PRODUCTS))
        quantity = self._chance.randint(1, 4)
        return {
            "order": self.ordered,
            "customer": f"c{self._chance.randrange(CUSTOMERS)}",
            "product": product,
            "quantity": quantity,
            "total": round(PRODUCTS[product] * quantity, 2),
            "at": time.time(),
        }

    def _answered(self, number: int, error: Any, message: Any) -> None:
        if error is not None:
            self.failed += 1
            return
        self.acked += 1
        if self._remembered is not None:
            self._remembered.add(number)
        partition, offset = message.partition(), message.offset()
        self._acked_until[partition] = max(self._acked_until.get(partition, -1), offset)

    def check(self, bootstrap: str) -> str:
        """Read the topic from this node. "" if every order acked so far is there, once, in order; else what is not."""
        from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

        consumer = Consumer(
            {"bootstrap.servers": bootstrap, "group.id": "auditor", "enable.auto.commit": False, "log_level": 2}
        )
        assert self._remembered is not None, "checked once already"
        acked, until = self._remembered.copy(), self._acked_until.copy()
        self._remembered = None
        try:
            consumer.assign([TopicPartition(TOPIC, partition, OFFSET_BEGINNING) for partition in until])
            return self._audit(consumer, acked, until)
        finally:
            consumer.close()

    def _audit(self, consumer: Any, acked: set[int], open_partitions: dict[int, int]) -> str:
        seen: set[int] = set()
        last: dict[int, int] = {}
        deadline = time.monotonic() + READ_TIMEOUT_S
        while open_partitions:
            if time.monotonic() > deadline:
                return f"could not read to the end within {READ_TIMEOUT_S:.0f} s"
            for message in consumer.consume(10_000, 0.2):
                if message.error() is not None:
                    continue
                partition, offset = message.partition(), message.offset()
                number = json.loads(message.value())["order"]
                if number in seen:
                    return f"order {number} is there twice"
                if number < last.get(partition, 0):
                    return f"order {number} stands after order {last[partition]}"
                seen.add(number)
                last[partition] = number
                if offset >= open_partitions.get(partition, offset + 1):
                    del open_partitions[partition]
        missing = acked - seen
        return f"{len(missing)} acked orders are missing, among them order {min(missing)}" if missing else ""
