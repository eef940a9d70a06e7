"""Kafka produce and consume through a leader and two followers, with librdkafka as the client.

One run, all of it on this machine: a leader and two followers (sync to one), producers and consumers in processes of
their own. Every record that was acked is read back and must be there once, in order. `--bootstrap` points the same load
at any other Kafka-compatible server instead; the servers' CPU is then not ours to count.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from confluent_kafka.admin import AdminClient, NewTopic
from kafka_clients import (
    Consumed,
    Load,
    Native,
    Produced,
    consume,
    one_record_request,
    produce,
    produce_many_singly,
    produce_one_at_a_time,
    settings,
    together,
)
from kafka_cluster import Cluster
from report import Report, arguments, compile_c, scratch_folder

MB = 1_000_000


class Bench:
    def __init__(self, report: Report, bootstrap: str, cluster: Cluster | None, options: Any, folder: str) -> None:
        self.report, self.bootstrap, self.cluster, self.options = report, bootstrap, cluster, options
        self.native = None if options.python else Native(folder)
        self.admin = AdminClient(settings(bootstrap))

    def topic(self, name: str, partitions: int) -> str:
        name = f"{name.replace(' ', '')}-{os.getpid()}"
        replicas = -1 if self.cluster else self.options.replicas
        for future in self.admin.create_topics([NewTopic(name, partitions, replicas)]).values():
            future.result(30)
        return name

    def check(self, topic: str, partitions: int, acked: int) -> list[Consumed]:
        """Every acked record is there once, in order."""
        tasks = [
            (self.bootstrap, topic, [p for p in range(partitions) if p % self.options.consumers == at])
            for at in range(min(self.options.consumers, partitions))
        ]
        shares = [acked * len(task[2]) // partitions for task in tasks]
        found = together(consume, [(*task, share) for task, share in zip(tasks, shares, strict=True)])
        wrong = next((one.wrong for one in found if one.wrong), "")
        total = sum(one.records for one in found)
        ok = not wrong and total == acked
        name = topic.rsplit("-", 1)[0]
        bar = f"all, once {wrong and f'({wrong})'}".rstrip()
        self.report.add(f"{name}: acked, read back in order", total, "records", reference=acked, bar=bar, ok=ok)
        return found

    def produce(self, load: Load, clients: int) -> list[Produced]:
        if self.native is not None:
            return self.native.stream(load, range(clients))
        found: list[Produced] = together(produce, [(load, number) for number in range(clients)])
        return found

    def throughput(self, name: str, size: int, records: int, unit: str, bar: float) -> float:
        """Records a second of all producers together."""
        clients = self.options.producers
        topic = self.topic(name, clients)
        load = Load(self.bootstrap, topic, clients, size, records // clients)
        before = self.cluster.cpu_s() if self.cluster else []
        with self._profiled(name):
            done = self.produce(load, clients)
        after = self.cluster.cpu_s() if self.cluster else []
        _complain(done)
        acked = sum(one.acked for one in done)
        took = max(one.ended for one in done) - min(one.began for one in done)
        rate = acked / took
        value = rate if unit == "records/s" else rate * size / MB
        self.report.add(f"{name}: produced, acks=all", value, unit, bar=f">= {bar:,.0f}", ok=value >= bar)
        if self.cluster:
            used = sum(after) - sum(before)
            gigabytes = acked * size / 1e9
            per_gb = used / gigabytes
            # At 256 B most of the work is a batch's and a record's, not a byte's: the bar is for the bytes.
            self.report.add(f"{name}: server CPU, all three", per_gb, "s/GB", bar="<= 10", ok=per_gb <= 10)
            self.report.add(f"{name}: of that the leader's", (after[-1] - before[-1]) / gigabytes, "s/GB")
        self.report.add(f"{name}: client CPU", sum(one.cpu_s for one in done) / (acked * size / 1e9), "s/GB")
        found = self.check(topic, clients, acked)
        read_s = max(one.ended for one in found) - min(one.began for one in found)
        self.report.add(f"{name}: consumed", sum(one.records for one in found) / read_s, "records/s")
        self.report.add(f"{name}: consumed", sum(one.octets for one in found) / read_s / MB, "MB/s")
        return rate

    def latency(self, name: str, size: int, rate: float, seconds: float) -> None:
        """At half of the highest load: how long a record waits for its ack, and how far the followers are behind."""
        clients = self.options.producers
        topic = self.topic(name, clients)
        each = rate / clients
        load = Load(self.bootstrap, topic, clients, size, int(each * seconds), rate=each, linger_ms=1.0)
        lags: list[float] = []
        with self._watching(lags):
            done = self.produce(load, clients)
        _complain(done)
        waits = sorted(itertools.chain.from_iterable(one.latencies_s[len(one.latencies_s) // 10 :] for one in done))
        took = max(one.ended for one in done) - min(one.began for one in done)
        self.report.add(f"{name}: load", sum(one.acked for one in done) / took, "records/s", reference=rate)
        self.report.add(f"{name}: p50", _percentile(waits, 0.5) * 1e3, "ms")
        p99 = _percentile(waits, 0.99) * 1e3
        self.report.add(f"{name}: p99", p99, "ms", bar="< 20", ok=p99 < 20)
        if lags:
            self.report.add(f"{name}: followers behind, p99", _percentile(sorted(lags), 0.99) * 1e3, "ms")
        self.check(topic, clients, sum(one.acked for one in done))

    @contextlib.contextmanager
    def _profiled(self, name: str) -> Iterator[None]:
        """With --profile: where the leader's time goes, for speedscope.app or any other viewer of that format."""
        if not self.options.profile or self.cluster is None:
            yield
            return
        path = f"{self.options.profile}-{name.replace(' ', '')}.json"
        leader = str(self.cluster.processes[-1].pid)
        spy = [str(Path(sys.executable).with_name("py-spy")), "record", "-p", leader, "-f", "speedscope", "-o", path]
        process = subprocess.Popen(spy, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)
            print(f"profile of the leader: {path}")

    @contextlib.contextmanager
    def _watching(self, lags: list[float]) -> Iterator[None]:
        if self.cluster is None:
            yield
            return
        context = multiprocessing.get_context("spawn")
        with context.Manager() as manager:
            found, stop = manager.list(), manager.Event()
            watcher = context.Process(target=_watch, args=(self.cluster.http[0], found, stop))
            watcher.start()
            yield
            stop.set()
            watcher.join()
            lags.extend(found)

    def one_at_a_time(self, records: int, program: str, folder: str) -> None:
        """The same client against our cluster, and against a server in C that only keeps the same promise."""
        bare_ms = _one_at_a_time_in_c(records, program, folder)
        topic = self.topic("one-at-a-time", 1)
        load = Load(self.bootstrap, topic, 1, 256, records)
        (done,) = together(produce_one_at_a_time, [(load, 0)])
        waits = sorted(done.latencies_s[records // 10 :])
        median = _percentile(waits, 0.5) * 1e3
        self.report.at_most("one at a time: median", median, "ms", bare_ms, 2.0)
        self.report.add("one at a time: p99", _percentile(waits, 0.99) * 1e3, "ms")
        self.check(topic, 1, done.acked)

    def many_sockets(self, clients: int, records: int, folder: str) -> None:
        """The same, with as little client as there can be: what is left is the servers'."""
        partitions = 4
        topic = self.topic(f"{clients}-sockets", partitions)
        request, at = one_record_request(topic, 256)
        path = Path(folder) / "request"
        path.write_bytes(request)
        program = compile_c("many_clients", folder)
        port = self.bootstrap.rsplit(":", 1)[1]
        before = self.cluster.cpu_s() if self.cluster else []
        places = (at["stamp"], at["crc"], at["error"], at["partition"])
        command = [program, port, *map(str, (clients, records, path, *places, partitions, 0))]
        found = subprocess.run(command, capture_output=True, text=True)
        after = self.cluster.cpu_s() if self.cluster else []
        if found.returncode:
            raise SystemExit(f"many_clients: {found.stderr}")
        acked, seconds, median, p99 = map(float, found.stdout.split())
        rate = acked / seconds
        name = f"{clients} sockets, one record each"
        self.report.add(name, rate, "records/s", bar=">= 10,000", ok=rate >= 10_000)
        self.report.add(f"{name}: median", median / 1e3, "ms")
        self.report.add(f"{name}: p99", p99 / 1e3, "ms")
        if self.cluster:
            self.report.add(f"{name}: leader's CPU", (after[-1] - before[-1]) / acked * 1e6, "us/record")
            self.report.add(f"{name}: a follower's CPU", (after[0] - before[0]) / acked * 1e6, "us/record")
        self.check(topic, partitions, int(acked))

    def many_singly(self, clients: int, records: int) -> None:
        workers = self.options.producers
        partitions = 4
        topic = self.topic(f"{clients}-clients", partitions)
        if self.native is not None:
            done = self.native.singly(Load(self.bootstrap, topic, partitions, 256, records), clients)
        else:
            load = Load(self.bootstrap, topic, partitions, 256, records // workers)
            done = together(produce_many_singly, [(load, number, clients // workers) for number in range(workers)])
        _complain(done)
        acked = sum(one.acked for one in done)
        took = max(one.ended for one in done) - min(one.began for one in done)
        rate = acked / took
        self.report.add(f"{clients} clients, one record each", rate, "records/s", bar=">= 10,000", ok=rate >= 10_000)
        self.report.add(f"{clients} clients: their CPU", sum(one.cpu_s for one in done) / acked * 1e6, "us/record")
        self.check(topic, partitions, acked)


def _one_at_a_time_in_c(records: int, program: str, folder: str) -> float:
    with subprocess.Popen([program, folder, "kafka", "bare"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        load = Load(f"127.0.0.1:{int(server.stdout.readline())}", "bare", 1, 256, records)
        (done,) = together(produce_one_at_a_time, [(load, 0)])
        server.terminate()
    return _percentile(sorted(done.latencies_s[records // 10 :]), 0.5) * 1e3


def _watch(http: str, found: Any, stop: Any) -> None:
    while not stop.wait(0.2):
        with (
            contextlib.suppress(OSError, ValueError),
            urllib.request.urlopen(f"http://{http}/status", timeout=5) as answer,
        ):
            found.extend([follower["lag_seconds"] for follower in json.load(answer)["followers"]])


def _say_why(cluster: Cluster) -> Any:
    """What the servers said, if the run ends in an error."""

    def leave(kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            print(cluster.logs(), file=sys.stderr)

    return leave


def _complain(done: list[Produced]) -> None:
    failed = next((one.failed for one in done if one.failed), "")
    if failed:
        print(f"a record was not acked: {failed}", file=sys.stderr)


def _percentile(ordered: list[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))] if ordered else float("nan")


def main() -> int:
    parser = arguments("kafka", __doc__.split("\n")[0])
    parser.add_argument("--bootstrap", metavar="HOST:PORT", help="another server, instead of a cluster of our own")
    parser.add_argument("--replicas", type=int, default=-1, help="of topics made on another server")
    parser.add_argument("--producers", type=int, default=2, help="producing processes")
    parser.add_argument("--consumers", type=int, default=2, help="consuming processes")
    parser.add_argument("--python", action="store_true", help="produce from confluent-kafka in Python, not from C")
    parser.add_argument("--profile", metavar="FILE", help="py-spy's record of the leader under load, FILE-256B.json …")
    parser.add_argument("--only", help="256B, 1KB, latency, one or 64")
    options = parser.parse_args()
    report = Report("kafka", options)
    scale = 0.1 if options.quick else 1.0

    def wanted(name: str) -> bool:
        return not options.only or name in options.only.split(",")

    with scratch_folder() as folder, contextlib.ExitStack() as stack:
        program = compile_c("bare_produce", folder)
        found = subprocess.run([program, folder, str(int(5000 * scale)), "400"], capture_output=True, check=True)
        report.limit("a record to three disks and back, in C", float(found.stdout.split()[0]) / 1e3, "ms")
        cluster = None
        if not options.bootstrap:
            cluster = Cluster(Path(folder))
            stack.push(_say_why(cluster))
            stack.callback(cluster.stop)
            cluster.start()
        bench = Bench(report, options.bootstrap or cluster.kafka[0], cluster, options, folder)  # type: ignore[union-attr]
        rate = 250_000.0
        if wanted("256B"):
            rate = bench.throughput("256 B", 256, int(4_000_000 * scale), "records/s", 250_000)
        if wanted("1KB"):
            bench.throughput("1 KB", 1024, int(1_500_000 * scale), "MB/s", 150)
        if wanted("latency"):
            bench.latency("256 B at half load", 256, min(rate, 250_000) / 2, max(5, 20 * scale))
        if wanted("one"):
            bench.one_at_a_time(int(5000 * scale), program, folder)
        if wanted("64"):
            bench.many_sockets(64, int(200_000 * scale), folder)
            bench.many_singly(64, int(100_000 * scale))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
