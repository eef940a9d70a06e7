"""kcat, the Debian package: an older librdkafka, as operators have it at hand."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterable

import pytest

from tests.clients.cluster import Cluster
from tests.clients.ledger import PARTITIONS, RECORDS, Ledger, value_of
from tests.clients.test_confluent import make_topic

KCAT = shutil.which("kcat")
pytestmark = pytest.mark.skipif(KCAT is None, reason="kcat is not installed (apt-get install kcat)")


def kcat(cluster: Cluster, *arguments: str, given: bytes = b"", timeout_s: float = 60) -> bytes:
    command = [KCAT or "", "-b", cluster.bootstrap, *arguments]
    done = subprocess.run(command, input=given, capture_output=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def produce(
    cluster: Cluster, topic: str, numbers: Iterable[int], partition: int, *options: str
) -> subprocess.Popen[bytes]:
    """Feed a kcat; it ends with 0 only if everything was delivered."""
    command = [KCAT or "", "-P", "-b", cluster.bootstrap, "-t", topic, "-p", str(partition), *options]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(b"".join(value_of(number) + b"\n" for number in numbers))
    process.stdin.flush()
    return process


def consume(cluster: Cluster, topic: str, ledger: Ledger) -> None:
    out = kcat(cluster, "-C", "-t", topic, "-o", "beginning", "-e", "-q", "-f", "%p %s\n")
    for line in out.splitlines():
        partition, _, value = line.partition(b" ")
        ledger.took(int(partition), value)


@pytest.mark.parametrize("idempotent", [True, False])
def test_through_a_leaders_death(cluster: Cluster, fresh: Callable[[str], str], idempotent: bool) -> None:
    topic = make_topic(cluster, fresh("kcat"))
    half = RECORDS // 2
    options = ["-X", f"enable.idempotence={str(idempotent).lower()}", "-X", "reconnect.backoff.max.ms=200", "-z", "lz4"]
    producers = []
    for partition in range(PARTITIONS):
        first = range(partition, half, PARTITIONS)
        producers.append(produce(cluster, topic, first, partition, *options))
    cluster.leader.kill()
    cluster.leader.start()
    for partition, producer in enumerate(producers):
        rest = range(half + partition, RECORDS, PARTITIONS)
        _, errors = producer.communicate(b"".join(value_of(number) + b"\n" for number in rest), timeout=60)
        assert producer.returncode == 0, errors.decode()
    cluster.leader.wait_ready()
    ledger = Ledger()
    ledger.acked.update(range(RECORDS))
    consume(cluster, topic, ledger)
    if idempotent:
        ledger.once_and_in_order()
    else:
        ledger.nothing_lost()


def test_a_group_and_the_metadata(cluster: Cluster, fresh: Callable[[str], str]) -> None:
    topic = fresh("kcat-first-use")
    kcat(cluster, "-P", "-t", topic, "-z", "zstd", given=b"one\ntwo\nthree\n")
    listed = kcat(cluster, "-L", "-t", topic).decode()
    assert f'topic "{topic}" with {PARTITIONS} partitions' in listed
    assert "3 brokers" in listed
    group = fresh("kcat-group")
    seen = kcat(cluster, "-G", group, "-o", "beginning", "-e", "-q", "-X", "auto.offset.reset=earliest", topic)
    assert sorted(seen.split()) == [b"one", b"three", b"two"]
    seen = kcat(cluster, "-G", group, "-e", "-q", "-X", "auto.offset.reset=earliest", topic)
    assert seen == b""  # committed
    offset = kcat(cluster, "-Q", "-t", f"{topic}:0:-1").decode()
    assert f"{topic} [0] offset" in offset
