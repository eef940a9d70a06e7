"""A cluster of real processes under load, to which bad things happen, round after round.

A leader and three followers in sync mode, an idempotent producer with acks=all. A round is one fault: kill -9 of one
node or of all, SIGSTOP, a promotion, a restart, and where the machine allows it a cut network (both ways or one), a
slow link, a full disk. At the end everything is mended, and then: all logs are byte-identical up to the high
watermark, and hold every acked record once, at the offset it was acked with, in order.

`scripts/chaos` runs any number of rounds; a seed gives the same faults in the same order (time is the machine's own).
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from chronik_repl.errors import Refused
from tests.end_to_end.namespaces import Namespaces, available, namespaces, small_disk
from tests.end_to_end.processes import Process, Processes, stream_bytes, until

NODES = (1, 2, 3, 4)
SMALL_DISK_NODE = 4
MIB_A_ROUND = 6
TOPIC = "chaos"
PARTITIONS = 2
RECOVER_S = 60.0
FULL = re.compile("is full|no space|No space", re.IGNORECASE)

Say = Callable[[str], None]


class Load:
    """Produces numbers, as fast as they are acked, and remembers what was acked where."""

    def __init__(self, bootstrap: str) -> None:
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "acks": "all",
                "enable.idempotence": True,
                "message.timeout.ms": 300_000,
                "linger.ms": 2,
                "batch.num.messages": 500,
                "reconnect.backoff.max.ms": 500,
                "retry.backoff.ms": 50,
                "topic.metadata.refresh.interval.ms": 1000,
                "socket.timeout.ms": 5000,
                "log_level": 0,
            }
        )
        self.acked: list[tuple[int, int, int]] = []  # partition, offset, number
        self.failed: list[str] = []
        self.sent = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.is_set():
            if self.sent - len(self.acked) < 2000:
                number = self.sent
                self._producer.produce(
                    TOPIC,
                    b"%d" % number + bytes(random.Random(number).randbytes(200)),
                    partition=number % PARTITIONS,
                    on_delivery=lambda error, message, number=number: self._answered(error, message, number),
                )
                self.sent += 1
                self._producer.poll(0)
            else:
                self._producer.poll(0.05)
            if self.sent % 20 == 0:
                time.sleep(0.002)

    def _answered(self, error: Any, message: Any, number: int) -> None:
        if error is not None:
            self.failed.append(str(error))
        else:
            self.acked.append((message.partition(), message.offset(), number))

    def end(self) -> None:
        """Everything that was sent is answered."""
        self._ending.set()
        self._thread.join()
        assert self._producer.flush(RECOVER_S) == 0, "records that were neither acked nor refused"


class Chaos:
    def __init__(self, path: Path, seed: int, *, rounds: int, hold: float = 1.0, say: Say = print) -> None:
        """`hold`: how long a fault lasts, against what is usual."""
        self._rounds = rounds
        self._longer = hold
        self._chance = random.Random(seed)
        self._say = say
        self._stack = ExitStack()
        self._path = path
        self._net: Namespaces | None = None
        self._unavailable = available()
        self.cluster = Processes(path)
        self.counts: dict[str, int] = {}
        self._deck: list[Callable[[], None]] = []

    def __enter__(self) -> Chaos:
        self._stack.callback(self.cluster.end)
        self._stack.callback(self._resume_all)
        if self._unavailable:
            self._say(f"without cut networks and full disks: {self._unavailable}")
        else:
            self._net = self._stack.enter_context(namespaces(NODES))
            self._stack.enter_context(small_disk(str(self._path / f"node-{SMALL_DISK_NODE}"), self._small_mib()))
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _small_mib(self) -> int:
        """All logs are kept to the end, for the proof: what is appended in so many rounds has room."""
        return 96 + MIB_A_ROUND * self._rounds

    def _start(self) -> None:
        for node_id in NODES:
            options: dict[str, Any] = {}
            if self._net is not None:
                options = {"host": self._net.host(node_id), "prefix": self._net.prefix(node_id)}
            self.cluster.add(node_id, "leader" if node_id == 1 else "follower", **options)
        common = {"insecure": "true", "wal_receiver_enabled": "true", "wal_segment_bytes": "1MiB"}
        common |= {"min_free_bytes": "4MiB", "default_partitions": str(PARTITIONS), "wal_retention_hours": "0"}
        for node in self.cluster.nodes.values():
            if node.node_id != 1:
                node.start(**common)
        listed = ",".join(n.replication for n in self.cluster.nodes.values() if n.node_id != 1)
        leader = self.cluster.nodes[1]
        leader.start(replication_followers=listed, replication_mode="sync", **common)
        for node in self.cluster.nodes.values():
            node.wait_ready()
        until(lambda: len(leader.status().get("members", ())) == len(NODES), "all are members")

    # Faults

    def run(self) -> None:
        """All rounds, then the proof."""
        bootstrap = ",".join(node.kafka for node in self.cluster.nodes.values())
        load = Load(bootstrap)
        until(lambda: len(load.acked) > 100, "the load runs", RECOVER_S)
        for number in range(self._rounds):
            fault = self._next_fault()
            before = len(load.acked)
            self._say(
                f"{number + 1}/{self._rounds} {fault.__name__.strip('_').replace('_', ' ')}; {before} records acked"
            )
            self.counts[fault.__name__] = self.counts.get(fault.__name__, 0) + 1
            fault()
            self._mend()
            until(lambda: len(load.acked) > before, "records are acked again", RECOVER_S)  # noqa: B023
        load.end()
        self._prove(load)

    def _next_fault(self) -> Callable[[], None]:
        """From a deck that is shuffled anew when it is empty: so few rounds meet every kind."""
        if not self._deck:
            self._deck = self.faults()
            self._chance.shuffle(self._deck)
        return self._deck.pop()

    def faults(self) -> list[Callable[[], None]]:
        always = [
            self._kill_a_follower, self._kill_the_leader, self._kill_all, self._stop_a_follower, self._stop_the_leader,
            self._promote, self._promote, self._restart_a_follower, self._kill_a_follower,
        ]  # fmt: skip
        if self._net is None:
            return always
        return [
            *always, self._cut_both_ways, self._cut_from_the_leader, self._cut_to_the_leader, self._slow_link,
            self._full_disk,
        ]  # fmt: skip

    def _leader(self) -> Process:
        return self.cluster.leader()

    def _follower(self) -> Process:
        leader = self._leader()
        return self._chance.choice([node for node in self.cluster.nodes.values() if node is not leader])

    def _hold(self, longest_s: float = 1.5) -> None:
        time.sleep(self._chance.uniform(0.05, longest_s) * self._longer)

    def _kill_a_follower(self) -> None:
        node = self._follower()
        node.kill()
        self._hold(1)
        node.start()

    def _kill_the_leader(self) -> None:
        node = self._leader()
        node.kill()
        self._hold(0.5)
        node.start()

    def _kill_all(self) -> None:
        nodes = list(self.cluster.nodes.values())
        self._chance.shuffle(nodes)
        for node in nodes:
            node.kill()
        self._chance.shuffle(nodes)
        for node in nodes:
            node.start()

    def _stop_a_follower(self) -> None:
        node = self._follower()
        node.pause()
        self._hold(3)
        node.resume()

    def _stop_the_leader(self) -> None:
        node = self._leader()
        node.pause()
        self._hold(3)
        node.resume()

    def _restart_a_follower(self) -> None:
        node = self._follower()
        node.wait_ready()  # one that was killed just before may not have come to where it hears SIGTERM
        code = node.stop()
        assert code == 0, f"exit code {code}: {node.said()[-2000:]}"
        node.start()

    def _promote(self) -> None:
        node = self._follower()
        try:
            node.call("promote")
        except Refused as refusal:  # it may be behind just then; then nothing changes
            self._say(f"  refused: {refusal}")

    def _cut_both_ways(self) -> None:
        leader, node = self._leader(), self._follower()
        for other in NODES:
            self._cut(node.node_id, other)
            self._cut(other, node.node_id)
        self._hold_until_felt("_cut_both_ways", lambda: self._lost(leader, node))

    def _cut_from_the_leader(self) -> None:
        leader, node = self._leader(), self._follower()
        self._cut(leader.node_id, node.node_id)
        self._hold_until_felt("_cut_from_the_leader", lambda: self._lost(leader, node))

    def _cut_to_the_leader(self) -> None:
        leader, node = self._leader(), self._follower()
        self._cut(node.node_id, leader.node_id)
        self._hold_until_felt("_cut_to_the_leader", lambda: self._lost(leader, node))

    def _cut(self, source: int, target: int) -> None:
        if source != target and self._net is not None:
            self._net.cut(source, target)

    def _hold_until_felt(self, fault: str, felt: Callable[[], Any]) -> None:
        """The first fault of each kind lasts until a node shows that it is real; the others as long as chance says."""
        if self.counts[fault] == 1:
            until(felt, f"a node feels it: {fault}", RECOVER_S)
        else:
            self._hold(3)

    def _lost(self, leader: Process, node: Process) -> bool:
        """Has the leader no session with that node any more?"""
        states = {f["node_id"]: f["state"] for f in leader.status().get("followers", ())}
        return states.get(node.node_id) == "connecting"

    def _slow_link(self) -> None:
        net = self._net
        assert net is not None
        leader = self._leader()  # it sends most
        net.slow(leader.node_id)
        self._hold_until_felt("_slow_link", lambda: net.throttled(leader.node_id))

    def _full_disk(self) -> None:
        node = self.cluster.nodes[SMALL_DISK_NODE]
        junk = node.data_dir / "junk"
        before = len(node.said())
        try:
            with junk.open("wb") as file:
                for piece in (1 << 20, 1 << 16):
                    with suppress(OSError):
                        while True:
                            os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, piece)
                while True:
                    file.write(bytes(1 << 16))
        except OSError:
            self._hold_until_felt("_full_disk", lambda: not node.alive or FULL.search(node.said()[before:]))
        finally:
            junk.unlink(missing_ok=True)

    # Mending and proof

    def _mend(self) -> None:
        if self._net is not None:
            self._net.mend()
        for node in self.cluster.nodes.values():
            if not node.alive:  # a full disk ends a process, as it should
                node.start()

    def _resume_all(self) -> None:
        for node in self.cluster.nodes.values():
            if node.alive:
                node.resume()

    def _prove(self, load: Load) -> None:
        assert not load.failed, load.failed[:5]
        log = self.cluster.same_logs(RECOVER_S)
        streams = {
            node_id: stream_bytes(node.data_dir, log["start"], log["high_watermark"])
            for node_id, node in self.cluster.nodes.items()
        }
        size = log["high_watermark"] - log["start"]
        assert all(len(stream) == size for stream in streams.values()), {n: len(s) for n, s in streams.items()}
        assert len(set(streams.values())) == 1, "the logs are not byte-identical"
        numbers = self._consumed(log)
        for partition, offset, number in load.acked:
            assert numbers[partition].get(offset) == number, (partition, offset, number)
        for partition, found in numbers.items():
            in_order = [number for _, number in sorted(found.items())]
            assert in_order == sorted(set(in_order)), f"duplicates or disorder in partition {partition}"
        for node in self.cluster.nodes.values():
            assert "Traceback" not in node.said(), node.said()[-3000:]
        self._say(f"{len(load.acked)} records acked, all there once, in order; {size} bytes the same on {len(streams)}")

    def _consumed(self, log: dict[str, Any]) -> dict[int, dict[int, int]]:
        leader = self._leader().kafka
        consumer = Consumer({"bootstrap.servers": leader, "group.id": "proof", "enable.auto.commit": False})
        found: dict[int, dict[int, int]] = {partition: {} for partition in range(PARTITIONS)}
        try:
            for partition in found:
                low, high = consumer.get_watermark_offsets(TopicPartition(TOPIC, partition), timeout=20)
                consumer.assign([TopicPartition(TOPIC, partition, low)])
                deadline = time.monotonic() + RECOVER_S
                while len(found[partition]) < high - low and time.monotonic() < deadline:
                    for message in consumer.consume(1000, timeout=1):
                        assert message.error() is None, message.error()
                        value = message.value()
                        found[partition][message.offset()] = int(value[:-200])
                assert len(found[partition]) == high - low
        finally:
            consumer.close()
        return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/chaos", description="Faults against a cluster of real processes.")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--keep", action="store_true", help="keep the directories of a good run too")
    options = parser.parse_args()
    path = Path(tempfile.mkdtemp(prefix="chaos-"))
    print(f"seed {options.seed}, in {path}")
    with Chaos(path, options.seed, rounds=options.rounds) as chaos:
        chaos.run()
    counts = sorted(chaos.counts.items())
    print("faults: " + ", ".join(f"{name.strip('_').replace('_', ' ')} {count}" for name, count in counts))
    if not options.keep:
        shutil.rmtree(path, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
