"""A leader that is drained grants over the connection that it dialled itself: nobody may close that under its feet."""

from __future__ import annotations

from pathlib import Path

import pytest

from chronik_repl.replication.messages import Handshake
from chronik_repl.replication.session import Connection
from tests.replication.cluster import produce, produced, running_cluster


async def test_connection_that_was_handed_over_stays_open_though_its_link_is_cancelled_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The promise that is asked for over it deposes the leader, and that ends the link, which may not have come as far
    as to know that the connection is another's now. This leader listens nowhere: it can grant in no other way."""
    async with running_cluster(tmp_path) as cluster:
        leader = await cluster.leader_and(1)  # async: everyone must grant
        await leader.up.log.committed.wait(produce(leader, b"kept").end)
        leadership = leader.up._leadership
        assert leadership is not None
        (link,) = leadership.links.values()
        hand_over = leadership.hand_over
        handed: list[Connection] = []

        def hand_over_and_be_cancelled(connection: Connection, asked: Handshake) -> None:
            hand_over(connection, asked)
            handed.append(connection)
            link.stop()

        monkeypatch.setattr(leadership, "hand_over", hand_over_and_be_cancelled)
        cluster.forgiving = True  # the old leader cannot follow, and says so
        await cluster.nodes[2].up.promote()
        assert len(handed) == 1
        assert cluster.nodes[2].up.role == "leader"
        assert await produced(cluster.nodes[2]) == [b"kept"]
