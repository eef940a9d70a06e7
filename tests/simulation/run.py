"""One seed, from start to verdict: deterministic, in simulated time.

Trio's scheduler shuffles the tasks that are ready; with these private names the shuffle follows the seed. A canary test
(test_simulation.py) fails when a new trio changes them.
"""

from __future__ import annotations

import gc
import random
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import structlog
import trio
import trio._core._run as trio_run

from chronik_repl import campaign, leader
from chronik_repl.kafka import producer_ids
from chronik_repl.replication import election, session, shipper
from chronik_repl.wal import committer
from tests.model.explore import planted
from tests.simulation.bugs import BUGS
from tests.simulation.clock import DRAIN_S, HANDSHAKE_S, SimClock
from tests.simulation.judge import Judge
from tests.simulation.story import Story

# Heartbeats are twenty times as fast as by default, and so is what has no variable: else a partition is over before a
# promotion has given up on those behind it. And chance is the seed's.
SCALED: tuple[tuple[Any, str, Any], ...] = (
    (session, "HANDSHAKE_TIMEOUT_S", HANDSHAKE_S),
    (election, "HANDSHAKE_TIMEOUT_S", HANDSHAKE_S),
    (shipper, "HANDSHAKE_TIMEOUT_S", HANDSHAKE_S),
    (campaign, "DRAIN_TIMEOUT_S", DRAIN_S),
    (leader, "DRAIN_TIMEOUT_S", 1.5 * DRAIN_S),
    (producer_ids, "uuid4", lambda: random.getrandbits(64)),
    (committer, "EARLY_BYTES", 1000),  # groups are small here, and two of them shall be with the disk at times
)


ENDLESS_S = 120  # of CPU time: a story takes half a second


class Endless(BaseException):
    """A step of the program that does not end: nothing else runs meanwhile, so no deadline can tell."""


def _endless(*_: object) -> None:
    raise Endless(f"nothing else ran for {ENDLESS_S} s of CPU time")


Teller = Callable[[int, Judge], Story]


class Outcome(NamedTuple):
    seed: int
    verdicts: tuple[str, ...]
    trace_hash: str
    appended: int
    acked: int
    troubles: tuple[str, ...]
    commits: int
    messages: int
    reads: int
    simulated_s: float
    cpu_s: float
    transcript: tuple[str, ...]
    with_bug: str


class Watching(trio.abc.Instrument):
    """Lets the judge look after every step of every task."""

    def __init__(self, judge: Judge) -> None:
        self._look = judge.look

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self._look()


def simulate(
    seed: int, *, bug: str | None = None, lines: int = 400, always_transcript: bool = False, tells: Teller = Story
) -> Outcome:
    """The story of this seed, with one bug planted if asked for."""
    with planted((*SCALED, *(BUGS[bug].patches if bug else ()))):
        return _simulate(seed, bug, lines, always_transcript, tells)


def _simulate(seed: int, bug: str | None, lines: int, always_transcript: bool, tells: Teller) -> Outcome:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    judge = Judge()
    began = time.process_time()
    simulated_s = 0.0
    stories: list[Story] = []
    clock = SimClock()

    async def main() -> None:
        nonlocal simulated_s
        story = tells(seed, judge)
        stories.append(story)
        try:
            with trio.fail_after(3000):
                await story.tell()
        finally:
            simulated_s = trio.current_time()
            clock.over = True

    collects = gc.isenabled()
    if collects:
        gc.collect()  # the story before, all of it: freezing what is left of it would keep it for ever
        gc.freeze()  # what was imported is not looked at again
    gc.disable()  # a story is short, and leaves few cycles: once, before the next one, is enough
    deterministic, shuffler = trio_run._ALLOW_DETERMINISTIC_SCHEDULING, trio_run._r
    global_state = random.getstate()
    trio_run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    trio_run._r = random.Random(seed)
    random.seed(seed)
    before = signal.signal(signal.SIGVTALRM, _endless)
    signal.setitimer(signal.ITIMER_VIRTUAL, ENDLESS_S)
    try:
        trio.run(main, clock=clock, instruments=[Watching(judge)])
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        judge.transcript.append((simulated_s, "EXCEPTION", tuple(traceback.format_exception(error))))
        judge.verdicts.append(f"an unexpected exception: {describe(error)}")
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        trio_run._ALLOW_DETERMINISTIC_SCHEDULING = deterministic  # type: ignore[misc]
        trio_run._r = shuffler
        random.setstate(global_state)
        if collects:
            gc.enable()
    story = stories[0]
    return Outcome(
        seed,
        tuple(judge.verdicts),
        judge.trace_hash(),
        story.appended,
        len(judge.acked),
        tuple(story.troubles),
        judge.commits,
        judge.messages,
        story.reads,
        simulated_s,
        time.process_time() - began,
        tuple(readable(*line) for line in judge.transcript[-lines:]) if judge.verdicts or always_transcript else (),
        f" --bug {bug}" if bug else "",
    )


def readable(at: float, what: str, detail: tuple[object, ...]) -> str:
    if what == "says":
        source, target, number, message = detail
        fields = ", ".join(
            f"{name} {value}"
            for name in message.__struct_fields__  # type: ignore[attr-defined]
            if (value := getattr(message, name)) not in (0, "", False, ())
            and name not in ("protocol", "cluster_id", "kafka_address", "http_address", "replication_address", "rack")
        )
        return f"{at:10.6f}  {source} → {target} #{number} {type(message).__name__} {fields}"
    return f"{at:10.6f}  {what} {' '.join(map(str, detail))}"


def describe(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    where = traceback.extract_tb(error.__traceback__)
    at = f" at {where[-1].filename.rpartition('/')[2]}:{where[-1].lineno}" if where else ""
    return f"{type(error).__name__}: {error}{at}"
