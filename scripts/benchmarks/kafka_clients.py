"""The Kafka benchmark's clients: what each process of the load does, and how they are started together.

Those that only produce are librdkafka in a program of its own (librdkafka_load.c), because confluent-kafka's Python
around it costs as much as all the servers; `produce` and `produce_many_singly` are the same loads from Python.

A Python worker's first argument is `begin`: it says that this process is ready, and returns when all of them are.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import struct
import subprocess
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import confluent_kafka
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from report import compile_c

STAMP = struct.Struct(">IQ")  # producer, number: the first bytes of every record
Begin = Callable[[], None]


class Load(NamedTuple):
    """What one producing process does."""

    bootstrap: str
    topic: str
    partitions: int
    size: int
    records: int
    rate: float = 0.0  # records a second; 0: as many as it can
    acks: str = "all"
    linger_ms: float = 5.0


class Produced(NamedTuple):
    acked: int
    failed: str
    began: float
    ended: float
    latencies_s: list[float]
    cpu_s: float


def settings(bootstrap: str, **more: Any) -> dict[str, Any]:
    return {"bootstrap.servers": bootstrap, "log_level": 2, **more}


def produce(begin: Begin, load: Load, number: int) -> Produced:
    producer = Producer(
        settings(
            load.bootstrap,
            acks=load.acks,
            **{
                "linger.ms": load.linger_ms,
                "batch.size": 1_000_000,
                "batch.num.messages": 100_000,
                "queue.buffering.max.messages": 200_000,
                "queue.buffering.max.kbytes": 262_144,
                "enable.idempotence": False,
                "max.in.flight.requests.per.connection": 5,
            },
        )
    )
    producer.list_topics(load.topic, timeout=10)
    state: dict[str, Any] = {"acked": 0, "failed": ""}
    latencies: list[float] = []
    clock, pack = time.perf_counter, STAMP.pack
    partition = number % load.partitions
    rest = os.urandom(load.size - STAMP.size)

    def delivered(error: Any, message: Any) -> None:
        if error is not None:
            state["failed"] = str(error)
        else:
            state["acked"] += 1

    def timed(sent_s: float) -> Any:
        def done(error: Any, message: Any) -> None:
            latencies.append(clock() - sent_s)
            delivered(error, message)

        return done

    begin()
    began, cpu = time.time(), time.process_time()
    if load.rate:
        start = clock()
        for at in range(load.records):
            due = start + at / load.rate
            while (wait := due - clock()) > 0:
                producer.poll(min(wait, 0.001))
            producer.produce(load.topic, pack(number, at) + rest, partition=partition, on_delivery=timed(clock()))
            if at % 64 == 0:
                producer.poll(0)
    else:
        for at in range(load.records):
            while True:
                try:
                    producer.produce(load.topic, pack(number, at) + rest, partition=partition, on_delivery=delivered)
                    break
                except BufferError:
                    producer.poll(0.01)
            if at % 1000 == 0:
                producer.poll(0)
    producer.flush(120)
    ended = time.time()
    return Produced(state["acked"], state["failed"], began, ended, latencies, time.process_time() - cpu)


def produce_one_at_a_time(begin: Begin, load: Load, number: int) -> Produced:
    """A record, its ack, the next."""
    producer = Producer(settings(load.bootstrap, acks=load.acks, **{"linger.ms": 0, "enable.idempotence": False}))
    producer.list_topics(load.topic, timeout=10)
    rest = os.urandom(load.size - STAMP.size)
    latencies = []
    acked = [0]

    def delivered(error: Any, message: Any) -> None:
        acked[0] += error is None

    begin()
    began, cpu = time.time(), time.process_time()
    for at in range(load.records):
        start = time.perf_counter()
        producer.produce(load.topic, STAMP.pack(number, at) + rest, partition=0, on_delivery=delivered)
        while acked[0] <= at:
            if not producer.poll(1.0) and time.perf_counter() - start > 30:
                raise SystemExit("no ack in 30 s")
        latencies.append(time.perf_counter() - start)
    return Produced(acked[0], "", began, time.time(), latencies, time.process_time() - cpu)


def produce_many_singly(begin: Begin, load: Load, number: int, clients: int) -> Produced:
    """Several clients, each in a thread of its own with one record under way."""
    rest = os.urandom(load.size - STAMP.size)
    share = load.records // clients
    acked = [0] * clients
    failed = [""]
    producers = []
    for _ in range(clients):
        producers.append(
            Producer(settings(load.bootstrap, acks=load.acks, **{"linger.ms": 0, "enable.idempotence": False}))
        )
        producers[-1].list_topics(load.topic, timeout=10)

    def run(at: int) -> None:
        me, producer = number * clients + at, producers[at]

        def delivered(error: Any, message: Any) -> None:
            acked[at] += error is None
            failed[0] = failed[0] or (str(error) if error is not None else "")

        for record in range(share):
            producer.produce(
                load.topic, STAMP.pack(me, record) + rest, partition=me % load.partitions, on_delivery=delivered
            )
            while acked[at] <= record and not failed[0]:
                producer.poll(1.0)

    threads = [threading.Thread(target=run, args=(at,)) for at in range(clients)]
    begin()
    began, cpu = time.time(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Produced(sum(acked), failed[0], began, time.time(), [], time.process_time() - cpu)


def one_record_request(topic: str, size: int) -> tuple[bytes, dict[str, int]]:
    """A Produce request (v9, acks=all) of one record of `size` bytes, and where its parts stand."""
    value = bytes(size)
    record = b"\0\0\0\x01" + _zigzag(size) + value + b"\0"
    record = _zigzag(len(record)) + record
    tail = struct.pack(">hiqqqhii", 0, 0, 0, 0, -1, -1, -1, 1) + record
    batch = struct.pack(">qiibI", 0, len(tail) + 9, -1, 2, 0) + tail
    head = struct.pack(">hhih5sb", 0, 9, 1, 5, b"bench", 0)
    body = struct.pack(">bhi", 0, -1, 30_000) + b"\x02" + _uvarint(len(topic) + 1) + topic.encode() + b"\x02"
    partition_at = 4 + len(head) + len(body)
    body += bytes(4) + _uvarint(len(batch) + 1)
    batch_at = 4 + len(head) + len(body)
    whole = head + body + batch + b"\0\0\0"
    return len(whole).to_bytes(4, "big") + whole, {
        "stamp": batch_at + len(batch) - 1 - size,
        "crc": batch_at + 17,
        "partition": partition_at,
        "error": 4 + 4 + 1 + 1 + len(_uvarint(len(topic) + 1)) + len(topic) + 1 + 4,
    }


def _uvarint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _zigzag(value: int) -> bytes:
    return _uvarint(value << 1)


class Consumed(NamedTuple):
    records: int
    octets: int
    wrong: str
    began: float
    ended: float


def consume(begin: Begin, bootstrap: str, topic: str, partitions: list[int], expected: int) -> Consumed:
    """Read these partitions from the start; each producer's records must come once, in order."""
    consumer = Consumer(
        settings(
            bootstrap,
            **{
                "group.id": "bench",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "fetch.message.max.bytes": 4_000_000,
                "queued.min.messages": 1_000_000,
                "queued.max.messages.kbytes": 131_072,
                "fetch.queue.backoff.ms": 5,  # by default it rests for a second when it has fetched enough
                "fetch.wait.max.ms": 100,
            },
        )
    )
    consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
    following: dict[int, int] = {}
    count = octets = 0
    wrong = ""
    begin()
    began = time.time()
    quiet_until = time.monotonic() + 30
    while count < expected and time.monotonic() < quiet_until:
        for message in consumer.consume(10_000, 0.5):
            if message.error():
                wrong = wrong or str(message.error())
                continue
            value = message.value()
            producer, number = STAMP.unpack_from(value)
            if number != following.get(producer, 0):
                wrong = wrong or f"producer {producer}: record {number} came instead of {following.get(producer, 0)}"
            following[producer] = number + 1
            count += 1
            octets += len(value)
            quiet_until = time.monotonic() + 30
    ended = time.time()
    with contextlib.suppress(KafkaException):
        consumer.close()
    return Consumed(count, octets, wrong, began, ended)


class Native:
    """librdkafka_load, compiled against the library of the confluent-kafka wheel."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        libraries = Path(confluent_kafka.__file__).parents[1] / "confluent_kafka.libs"
        library = next(libraries.glob("librdkafka*"))
        self._program = compile_c("librdkafka_load", folder, str(library), f"-Wl,-rpath,{library.parent}")

    def stream(self, load: Load, numbers: range) -> list[Produced]:
        """A producer for each number, each to a partition of its own as far as there are enough."""
        return self._run(
            "stream", load.bootstrap, load.topic,
            [(n % load.partitions, n, load.size, load.records, load.rate, load.linger_ms, load.acks) for n in numbers],
        )  # fmt: skip

    def singly(self, load: Load, clients: int) -> list[Produced]:
        """All of them in one process, each with one record under way."""
        return self._run(
            "singly", load.bootstrap, load.topic, [(load.partitions, 0, load.size, load.records, clients, load.acks)]
        )

    def _run(self, mode: str, bootstrap: str, topic: str, loads: list[tuple[Any, ...]]) -> list[Produced]:
        processes = []
        files = [self._folder / f"waits-{at}" for at in range(len(loads))]
        for load, file in zip(loads, files, strict=True):
            command = [self._program, mode, bootstrap, topic, *map(str, load), str(file)]
            processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise SystemExit(f"librdkafka_load did not begin: exit code {process.wait()}")
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        found = []
        for process, file in zip(processes, files, strict=True):
            out, _ = process.communicate(timeout=600)
            if process.returncode:
                raise SystemExit(f"librdkafka_load failed: exit code {process.returncode}")
            acked, _, began, ended, cpu, reason = out.rstrip("\n").split(" ", 5)
            waits = array("f")
            waits.frombytes(file.read_bytes())
            found.append(Produced(int(acked), reason, float(began), float(ended), waits.tolist(), float(cpu)))
        return found


def together(work: Any, tasks: list[tuple[Any, ...]]) -> list[Any]:
    """Each task in a process of its own, all beginning at once."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        ready, go, results = manager.Queue(), manager.Event(), manager.Queue()
        processes = [context.Process(target=_work, args=(work, task, ready, go, results)) for task in tasks]
        for process in processes:
            process.start()
        for _ in tasks:
            ready.get(timeout=60)
        go.set()
        found = [results.get(timeout=600) for _ in tasks]
        for process in processes:
            process.join()
    for result in found:
        if isinstance(result, str):
            raise SystemExit(result)
    return found


def _work(work: Any, task: tuple[Any, ...], ready: Any, go: Any, results: Any) -> None:
    def begin() -> None:
        ready.put(None)
        go.wait()

    try:
        results.put(work(begin, *task))
    except BaseException as error:
        results.put(f"{work.__name__}: {error!r}")
        raise
