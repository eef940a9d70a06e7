"""A busy cluster of real processes, and clean runs of the check over it: `scripts/parity-live 20`.

While a producer writes with every compression, segments roll and retention removes them, followers are killed and come
back: whatever the moment, copies of one log are the same below the high watermark, and the check must not say
otherwise.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, Message, Producer

from chronik_repl.spark.parity import Options, run
from chronik_repl.spark.report import headline
from chronik_repl.spark.verdict import Report
from tests.clients.cluster import Cluster
from tests.end_to_end.processes import until

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
VARIABLES = {"WAL_SEGMENT_BYTES": str(1 << 20), "WAL_RETENTION_BYTES": str(6 << 20)}


class Load:
    """Producers in a thread, one a compression, until it is told to end."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._over = threading.Event()
        self.acked = 0
        self.topics: set[str] = set()  # that have an acked record
        self._thread = threading.Thread(target=self._produce, name="load")

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _produce(self) -> None:
        producers = [
            Producer({"bootstrap.servers": self._bootstrap, "acks": "all", "compression.type": codec, "linger.ms": 5})
            for codec in CODECS
        ]
        number = 0
        while not self._over.is_set():
            for producer, codec in zip(producers, CODECS, strict=True):
                for _ in range(20):
                    value = (b"%d " % number) * (1 + number % 60)
                    producer.produce(f"live-{codec}", value, key=b"%d" % (number % 97), on_delivery=self._delivered)
                    number += 1
                producer.poll(0)
            self._over.wait(0.01)  # a few MB/s: retention must not outrun the check
        for producer in producers:
            producer.flush(30)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            self.acked += 1
            self.topics.add(str(message.topic()))


def options(cluster: Cluster, **more: Any) -> Options:
    copies = tuple((f"node-{node.node_id}", str(node.data_dir)) for node in cluster.nodes)
    return Options(copies, leader=f"http://{cluster.leader.http}", **more)


def check(spark: Any, cluster: Cluster, state: str | None) -> Report:
    report = run(spark, options(cluster, state=state))
    assert report.verdict == "same", (report.differences[:5], report.notes)
    assert report.records > 0
    return report


def main(runs: int) -> int:
    from chronik_repl.spark.session import open_session

    spark = open_session("local[2]")
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder), 2, **VARIABLES)
        cluster.start()
        try:
            with Load(cluster.bootstrap) as load:
                until(lambda: load.acked > 20_000, "some load", 120)
                for number in range(runs):
                    victim = cluster.followers[number % 2]
                    if number % 4 == 1:
                        victim.kill()
                    report = check(spark, cluster, f"{folder}/state" if number % 2 else None)
                    start = min(copy.start for copy in report.copies)
                    print(f"{number + 1} of {runs}: {headline(report)} Log start {start:,}.", flush=True)
                    if not victim.alive:
                        victim.start()
        finally:
            cluster.stop()
    spark.stop()
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="scripts/parity-live", description="Clean runs over a busy cluster.")
    parser.add_argument("runs", type=int, nargs="?", default=20)
    sys.exit(main(parser.parse_args().runs))
