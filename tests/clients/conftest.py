"""One cluster for all clients' tests: each test has topics and groups of its own, and may kill nodes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from tests.clients.cluster import Cluster

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def running_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(running_cluster: Cluster) -> Cluster:
    """Whatever the test before did to it: everyone is up."""
    for node in running_cluster.nodes:
        if not node.alive:
            node.start()
    for node in running_cluster.nodes:
        node.wait_ready()
    return running_cluster


@pytest.fixture
def fresh() -> Callable[[str], str]:
    """A name that no other test has."""
    return lambda prefix: f"{prefix}-{next(_numbers)}"
