"""A member of a consumer group, as a process that can be killed.

    python -m tests.clients.member BOOTSTRAP GROUP TOPIC FILE

It writes the number of each record into FILE, and only then commits it. A line "assigned N" says how many partitions
it has.
"""

from __future__ import annotations

import signal
import sys
from typing import Any, TextIO

from confluent_kafka import Consumer, KafkaException

from tests.clients.ledger import number_of


def main(bootstrap: str, group: str, topic: str, file: str) -> None:
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.append(number))
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap, "group.id": group, "auto.offset.reset": "earliest",
            "enable.auto.commit": False, "session.timeout.ms": 2000, "heartbeat.interval.ms": 300,
            "fetch.wait.max.ms": 100, "reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 200,
        }
    )  # fmt: skip
    with open(file, "w", encoding="ascii") as out:
        consumer.subscribe([topic], on_assign=lambda _, places: say(out, f"assigned {len(places)}"))
        while not stopping:
            messages = [message for message in consumer.consume(100, 0.1) if not message.error()]
            if messages:
                say(out, "\n".join(str(number_of(message.value())) for message in messages))
                commit(consumer)
        consumer.close()


def say(out: TextIO, text: str) -> None:
    out.write(text + "\n")
    out.flush()


def commit(consumer: Any) -> None:
    try:
        consumer.commit(asynchronous=False)
    except KafkaException as error:
        if error.args[0].fatal():  # else the next one says more
            raise


if __name__ == "__main__":
    main(*sys.argv[1:])
