"""kafkajs, the JavaScript client: produce, a leader's death, consume in a group."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.cluster import Cluster
from tests.clients.ledger import PARTITIONS, RECORDS, Ledger
from tests.clients.test_confluent import make_topic

VERSION = "2.2.4"
SCRIPT = Path(__file__).with_name("kafkajs_client.js")


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where node finds kafkajs: from the package registry, or this is a skip that says so."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("node")
    command = ["npm", "install", "--no-audit", "--no-fund", "--no-save", "--prefix", str(folder), f"kafkajs@{VERSION}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("npm could not install kafkajs within a minute")
    if done.returncode:
        pytest.skip(f"npm could not install kafkajs: {done.stderr[-200:]}")
    return folder / "node_modules"


@pytest.mark.parametrize("idempotent", [True, False])
def test_through_a_leaders_death(
    cluster: Cluster, fresh: Callable[[str], str], modules: Path, idempotent: bool
) -> None:
    topic = make_topic(cluster, fresh("kafkajs"))
    client = subprocess.Popen(
        ["node", str(SCRIPT), cluster.bootstrap, topic, str(RECORDS), str(PARTITIONS), str(idempotent).lower()],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={"NODE_PATH": str(modules), "PATH": "/usr/bin:/bin:/usr/local/bin", "KAFKAJS_NO_PARTITIONER_WARNING": "1"},
    )  # fmt: skip
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == b"half\n"
        cluster.leader.kill()
        cluster.leader.start()
        out, errors = client.communicate(timeout=60)
        assert client.returncode == 0, errors.decode()
    finally:
        client.kill()
        client.wait()
        cluster.leader.wait_ready()
    acked, *lines = out.splitlines()
    assert acked == b"acked %d" % RECORDS
    ledger = Ledger()
    ledger.acked.update(range(RECORDS))
    ledger.took_all((int(partition), value) for partition, _, value in (line.partition(b" ") for line in lines))
    ledger.nothing_lost()
    if idempotent:
        ledger.once_and_in_order()
