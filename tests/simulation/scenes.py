"""Known failures, each told from its first step to its last: the production code of a whole cluster, no chance in it.

A scene is a list of steps that lost data somewhere (the numbers are those of docs/reliability.md). It is played twice:
as the code is, and with the rule planted out that the failure is about; the first must hold, the second must not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

import pytest
import trio

from chronik_repl.errors import Refused
from tests.simulation.clock import DRAIN_S, HANDSHAKE_S
from tests.simulation.cluster import Cluster, Machine
from tests.simulation.judge import Judge
from tests.simulation.story import Story
from tests.simulation.workload import IDEMPOTENT


class Scene(Story):
    """Steps, by name. `n1` leads at first, all others follow it and hold what it holds."""

    def __init__(self, seed: int, judge: Judge, act: Act) -> None:
        super().__init__(seed, judge)
        self._act = act
        self.size = self.size._replace(nodes=act.nodes, sync_replicas=act.sync_replicas, retention=False)
        self.cluster = Cluster(seed, judge, nodes=act.nodes, sync_replicas=act.sync_replicas)
        self.rng = self.cluster.rng
        self._lives: dict[str, int] = {}  # of those that were ended: which one that was

    async def tell(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for machine in self.cluster.machines.values():
                nursery.start_soon(self._keep_running, machine)
            nursery.start_soon(self._make_topic)
            if self._act.whole_at_first:
                assert await self._wait_until(self.whole, 20)
                await self.write("n1", 3)
                assert await self._wait_until(self.whole, 20)
            await self._act.play(self)
            self._calm_down()
            if not self.judge.verdicts:
                await self._calm()
            nursery.cancel_scope.cancel()

    def whole(self, others: int | None = None) -> bool:
        """Does somebody lead with so many others (all, if nothing is said)?"""
        leading = self.cluster.leader()
        known = leading is not None and leading.node is not None and "t" in leading.node.log.state.topics
        return known and len(self._in_session()) == (self.size.nodes - 1 if others is None else others)

    def at(self, name: str) -> Machine:
        return self.cluster.machines[name]

    def cut(self, ones: str, others: str, *, both: bool = True) -> None:
        for one in ones.split():
            for other in others.split():
                self.cluster.fabric.cut(one, other)
                if both:
                    self.cluster.fabric.cut(other, one)

    def heal(self) -> None:
        self.cluster.fabric.heal_all()

    async def write(self, name: str, count: int = 1, *, everyone: bool = True) -> None:
        """Appends, and a moment in which they may be acked."""
        with trio.move_on_after(0.3):
            async with trio.open_nursery() as nursery:
                for _ in range(count):
                    nursery.start_soon(lambda: self._append(IDEMPOTENT, self.at(name), everyone=everyone))

    def kill(self, name: str, back_after_s: float) -> None:
        self._ends(name, back_after_s)
        self.at(name).kill()

    def cut_power(self, name: str, back_after_s: float) -> None:
        self._ends(name, back_after_s)
        self.at(name).power_cut()

    def _ends(self, name: str, back_after_s: float) -> None:
        self._lives[name] = self.at(name).boots
        self._start(self.at(name), back_after_s)

    def wipe(self, name: str, back_after_s: float) -> None:
        self._to_wipe.add(name)
        self.cut_power(name, back_after_s)

    async def back(self, name: str) -> None:
        """In its next life."""
        machine, before = self.at(name), self._lives[name]
        assert await self._wait_until(lambda: machine.boots > before and machine.node is not None, 10)

    async def promote(self, name: str) -> bool:
        return await self._promote_one(self.at(name), accept_loss=False)

    async def silence(self) -> None:
        """Until nobody hears anything of who is cut off."""
        await trio.sleep(2)

    async def begins(self, name: str) -> None:
        """Promote, and be there in the very step in which it begins to lead."""
        assert self._nursery is not None
        began = self.judge.beginnings[name] = trio.Event()
        self._nursery.start_soon(self.promote, name)
        with trio.move_on_after(5):
            await began.wait()


class Act(NamedTuple):
    play: Callable[[Scene], Awaitable[object]]
    bug: str
    nodes: int = 3
    sync_replicas: int = 1
    whole_at_first: bool = True


async def lagging_high_watermark(scene: Scene) -> None:
    """n2 has what was committed, and restarts before that stands on its own disk; the leader dies, n2 leads."""
    scene.cut("n1", "n3")
    await scene.write("n1", 5)
    scene.kill("n1", 6.0)
    scene.kill("n2", 0.0)
    await scene.back("n2")
    await scene.promote("n2")
    await scene.write("n2", 2)


async def unknown_epoch(scene: Scene) -> None:
    """n2 begins epoch 2 and nobody hears of it; another leads epoch 3; n2 comes back."""
    scene.kill("n1", 4.0)
    await scene.begins("n2")
    scene.cut("n2", "n1 n3")
    assert await scene._wait_until(lambda: scene.at("n2").leads, 1)
    await scene.write("n2", 3, everyone=False)
    scene.kill("n2", 8.0)
    await scene.back("n1")
    await scene.promote("n3")
    assert await scene._wait_until(lambda: scene.cluster.leader() is not None, 5)
    leading = scene.cluster.leader()
    assert leading is not None
    await scene.write(leading.name, 4)
    await scene.back("n2")


async def stale_tail(scene: Scene) -> None:
    """The old leader has written what nobody else has, and comes back behind two epochs."""
    scene.cut("n1", "n2 n3")
    await scene.write("n1", 4, everyone=False)
    await scene.promote("n2")
    await scene.write("n2", 4)
    await scene.promote("n3")
    await scene.write("n3", 4)


async def short_log_stands(scene: Scene) -> None:
    """n3 lags behind what n1 and n2 committed; n1 dies, and n3 stands with n2's word."""
    scene.cut("n1", "n3")
    await scene.write("n1", 6)
    scene.kill("n1", 6.0)
    await scene.silence()
    await scene.promote("n3")
    await scene.write("n3", 2)


async def lonely_candidate(scene: Scene) -> None:
    """n3 lags and reaches nobody, and stands all the same."""
    scene.cut("n3", "n1 n2")
    await scene.write("n1", 6)
    await scene.promote("n3")
    await scene.write("n3", 2)


async def paused_leader(scene: Scene) -> None:
    """n1 is paused, n2 leads; n1 wakes up where only n3 hears it, and goes on as if nothing had been."""
    scene.at("n1").freeze()
    await scene.silence()
    await scene.promote("n2")
    await scene.write("n2", 3)
    scene.cut("n1", "n2")
    scene.cut("n2", "n3")
    await trio.sleep(2)
    scene._resume(scene.at("n1"))
    await scene.write("n1", 3)
    await trio.sleep(3)


async def promise_is_lost(scene: Scene) -> None:
    """n3 promises n2 an epoch and loses its power; n1, which has not heard of it, goes on with n3."""
    scene.cut("n1", "n2")
    await scene.begins("n2")
    scene.cut_power("n3", 0.1)
    await scene.back("n3")
    await scene.write("n1", 3)
    await trio.sleep(2)


async def late_message(scene: Scene) -> None:
    """n3 promises n2 an epoch; what n1 sends it in the session before must not be acked any more."""
    scene.cut("n1", "n2")
    await scene.silence()
    assert scene._nursery is not None
    scene._nursery.start_soon(scene.promote, "n2")
    await trio.sleep(1.2 * HANDSHAKE_S)  # n3 has promised, n2 still waits for n1's word
    await scene.write("n1", 3, everyone=False)
    await trio.sleep(2)


async def restarted_reader(scene: Scene) -> None:
    """A follower restarts while its leader is away: what it showed it shows again."""
    await scene.write("n1", 6)
    await trio.sleep(0.5)
    scene.kill("n1", 4.0)
    scene.cut_power("n2", 0.1)
    await scene.back("n2")


async def begins_alone(scene: Scene) -> None:
    """A sync cluster whose leader founds it before any follower can be reached: nobody else holds what it has."""
    scene.cluster.variables(scene.at("n1"), bootstrap=True)
    scene.cut("n1", "n2 n3")
    assert await scene._wait_until(lambda: scene.whole(others=0), 10)
    await scene.write("n1", 3)
    await scene.write("n1", 3, everyone=False)
    scene.heal()
    assert await scene._wait_until(scene.whole, 20)
    await scene.write("n1", 3)


async def second_leader_of_an_epoch(scene: Scene) -> None:
    """n1 dies; n2 and n3 are promoted in the same moment and take the same number from n4."""
    scene.kill("n1", 5.0)
    scene.cut("n2", "n3")
    async with trio.open_nursery() as nursery:
        for name in ("n2", "n3"):
            nursery.start_soon(scene.promote, name)


async def wiped_voter(scene: Scene) -> None:
    """n1 and n2 committed what n3 has not; n2 loses its disk, n1 dies, and n3 stands with n2's word."""
    scene.cut("n1", "n3")
    await scene.write("n1", 6)
    scene.wipe("n2", 0.1)
    scene.kill("n1", 8.0)
    await scene.silence()
    await scene.back("n2")
    await scene.promote("n3")
    await scene.write("n3", 2)


async def start_is_lost(scene: Scene) -> None:
    """A leader whose start frame was on its way before it was durable loses its power."""
    await scene.begins("n2")
    await trio.sleep(0.0005)
    scene.cut_power("n2", 0.1)
    await scene.back("n2")


async def old_frames(scene: Scene) -> None:
    """n2 takes over frames of epoch 1 that only some hold, and must not count them before its own start frame is
    with the others."""
    scene.cut("n1", "n3")
    await scene.write("n1", 6, everyone=False)
    scene.kill("n1", 6.0)
    scene.heal()
    scene.at("n3").disk.slowness = 50.0
    scene._slow_disk["n3"] = 1e9
    await scene.promote("n2")
    await scene.silence()


async def shown_before_the_cut(scene: Scene) -> None:
    """n1 comes back with a tail of its own, below the new leader's high watermark."""
    scene.cut("n1", "n2 n3")
    await scene.write("n1", 4, everyone=False)
    scene.kill("n1", 8.0)
    await scene.silence()
    await scene.promote("n2")
    await scene.write("n2", 8)
    scene.heal()
    await scene.back("n1")


async def alone_again(scene: Scene) -> None:
    """An async leader promises another its loyalty, dies, and starts where it hears nobody."""
    await scene.begins("n2")
    scene.cut("n1", "n2 n3")
    scene.kill("n1", 0.1)
    await scene.write("n2", 3)
    await scene._wait_until(lambda: scene.at("n1").leads, 3)
    await scene.write("n1", 3)


async def empty_founder(scene: Scene) -> None:
    """The program that founded the cluster starts again with an empty disk."""
    await scene.promote("n2")
    scene.at("n1").program = "leader"
    scene.wipe("n1", 0.1)
    await scene.back("n1")
    await trio.sleep(1)


async def old_leader_asks(scene: Scene) -> None:
    """The old leader restarts when another has just begun and nobody else has its start frame yet: it could win."""
    scene.kill("n1", 4.0)
    await scene.silence()
    await scene.begins("n2")
    scene.cut("n2", "n3")
    await scene.back("n1")
    await trio.sleep(1)


async def dies_while_it_drains(scene: Scene) -> None:
    """A living leader is drained for n3's promotion, and dies meanwhile: there is nobody left to wait for."""
    leader = scene.at("n1")
    leader.disk.slowness = 2000.0
    scene._slow_disk["n1"] = 1e9
    assert scene._nursery is not None
    scene._nursery.start_soon(lambda: scene._append(IDEMPOTENT, leader, everyone=False))
    scene._nursery.start_soon(scene.promote, "n3")
    assert await scene._wait_until(
        lambda: leader.node is not None and leader.node._leadership is not None and leader.node._leadership.draining, 1
    )
    scene.kill("n1", 6.0)
    assert await scene._wait_until(lambda: scene.at("n3").leads, DRAIN_S / 2)


async def promise_in_the_page_cache(scene: Scene) -> None:
    """n3 promises n2 an epoch and the folder's sync fails: its process ends, and the next one reads the promise from
    the page cache. It must be on the disk before anyone hears of it."""
    await scene.silence()
    scene.at("n3").disk.fail_sync_in(2)  # the file's own sync is the first
    scene._ends("n3", 0.1)
    await scene.promote("n2")
    await scene.back("n3")
    await scene.silence()


async def removal_that_could_not_be_committed(scene: Scene) -> None:
    """The only follower that is there is to be removed. That could never be committed, and would stand in the way of
    every later change."""
    for name in ("n3", "n4"):
        scene.kill(name, 6.0)
    await scene.silence()
    node = scene.at("n1").node
    assert node is not None
    with pytest.raises(Refused, match="could not be committed"):
        await node.command({"command": "members-remove", "node_id": 2}, lambda text: None)
    await scene.back("n4")
    await scene.silence()
    with trio.fail_after(5):
        await node.command({"command": "members-remove", "node_id": 2}, lambda text: None)


async def removal_before_the_start_is_committed(scene: Scene) -> None:
    """A leader has begun, and nobody else's disk is fast enough to commit that soon: a removal waits for the leader's
    start to be committed. It asked again and again instead, and let nobody else run."""
    await scene.begins("n2")
    for name in ("n1", "n3"):
        scene.at(name).disk.slowness = 20_000.0
        scene._slow_disk[name] = 1e9
    node = scene.at("n2").node
    assert node is not None
    assert await scene._wait_until(lambda: node.accepting, 1)
    with trio.move_on_after(0.1) as soon:
        await node.command({"command": "members-remove", "node_id": 1}, lambda text: None)
    assert soon.cancelled_caught


async def full_follower(scene: Scene) -> None:
    """A follower whose disk is full ends each session at its first frame. It is dialled again, but not all the time."""
    full, leader = scene.at("n3"), scene.at("n1")
    assert full.node is not None
    full.disk.capacity_bytes = full.disk.medium.used_bytes()
    await scene.silence()  # it looks at its free space now and then
    await scene.write("n1", 6)
    assert leader.node is not None
    assert leader.node._leadership is not None
    link = leader.node._leadership.links["n3:9291"]
    before = link.reconnects
    await trio.sleep(3)
    assert 0 < link.reconnects - before < 20, f"{link.reconnects - before} times in 3 s"


ACTS: dict[str, Act] = {
    "kf1": Act(lagging_high_watermark, "truncate-to-high-watermark"),
    "kf2": Act(unknown_epoch, "guess-unknown-epoch"),
    "kf3": Act(stale_tail, "no-truncation"),
    "kf4": Act(short_log_stands, "shorter-log-leads"),
    "kf5": Act(paused_leader, "older-epoch-granted"),
    "kf6": Act(promise_is_lost, "promise-in-memory"),
    "kf7": Act(lonely_candidate, "one-grant-fewer"),
    "kf8": Act(late_message, "old-session-goes-on"),
    "kf9": Act(restarted_reader, "high-watermark-not-kept"),
    "kf34": Act(begins_alone, "sync-begins-alone", whole_at_first=False),
    "kf51": Act(old_frames, "count-old-frames"),
    "kf52": Act(start_is_lost, "start-not-durable"),
    "kf53": Act(second_leader_of_an_epoch, "equal-epoch", 4, 2),
    "kf54": Act(wiped_voter, "amnesia"),
    "kf56": Act(shown_before_the_cut, "show-before-cut"),
    "kf57": Act(alone_again, "async-starts-alone", 3, 0),
    "kf58": Act(empty_founder, "second-history"),
    "kf59": Act(old_leader_asks, "deposes-by-asking"),
}

# Without a rule to plant out: these were bugs, and are tests now.
SHORT: dict[str, Act] = {
    "dies-while-it-drains": Act(dies_while_it_drains, ""),
    "promise-in-the-page-cache": Act(promise_in_the_page_cache, ""),
    "full-follower": Act(full_follower, ""),
    "removal-that-could-not-be-committed": Act(removal_that_could_not_be_committed, "", 4),
    "removal-before-the-start-is-committed": Act(removal_before_the_start_is_committed, ""),
}
