"""Every interleaving of small clusters, within bounds that fit into a test run; `scripts/model` goes further."""

from __future__ import annotations

import pytest

from tests.model.explore import VARIANTS, breadth_first, explore, say, walks
from tests.model.world import Bounds, World

# Found within some thousand states. The others take a minute: `scripts/model --variants`.
QUICK = (
    "one-grant-fewer",
    "log-ahead",
    "late-acks",
    "no-truncation",
    "many-changes",
    "directory",
    "same-epoch-again",
    "async-by-log",
    "async-by-last-promise",
    "old-set-alone",
)


@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(),
        Bounds(k=2),
        Bounds(nodes=2, members=2, epochs=4, data=2, crashes=2),
        Bounds(k=0),
        Bounds(nodes=4, changes=1, wipes=1),
        Bounds(losses=1),
    ],
    ids=["sync-1", "sync-2", "two-nodes", "async", "members", "accept-loss"],
)
def test_nothing_committed_is_lost_in_the_nearest_states(bounds: Bounds) -> None:
    found = breadth_first(World(bounds), states_max=15_000)
    assert not found.broken, say(found.trace)
    assert found.states > 15_000


def test_nothing_committed_is_lost_in_deep_walks() -> None:
    large = Bounds(nodes=4, members=3, epochs=4, data=3, crashes=3, wipes=1, changes=2)
    found = walks(World(large), steps_max=8_000, depth_max=90, seed=7)
    assert not found.broken, say(found.trace)


def test_a_world_can_be_exhausted() -> None:
    found = breadth_first(World(Bounds(nodes=2, members=2, epochs=2, data=1, crashes=1)))
    assert found.exhausted
    assert not found.broken, say(found.trace)


@pytest.mark.parametrize("name", QUICK)
def test_a_rule_left_out_is_found(name: str) -> None:
    assert explore(VARIANTS[name], states_max=30_000).broken
