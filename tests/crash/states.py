"""Crash states: every disk that a power cut could leave behind at one point of a recording, or a fair sample of them.

`crash_states` plays the recording. Before each event it asks what is undecided: writes, truncations, directory
entries that no sync has covered. Of those it makes states: all subsets where they are few; otherwise none, all, each
alone, each alone missing, every prefix, and random ones; each write also torn, at its first and last sectors, in the
middle, and at random ones. Equal states are given out once.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import trio
import trio.testing

from chronik_repl.errors import ChronikError
from tests.crash.scenario import Truth, record_life, recovered
from tests.simulation.medium import SECTOR, Change, Entry, Event, Keep, Medium

ALL_SUBSETS_UP_TO = 5


class Failure(NamedTuple):
    event: int
    state: str
    complaint: str


def crash_states(
    events: Sequence[Event], rng: random.Random, *, random_states: int = 6, skip: float = 0.0
) -> Iterator[tuple[int, str, Medium, Truth]]:
    """(number of the event, name of the state, the disk, the truth). `skip`: the share of points to leave out."""
    medium, truth = Medium(), Truth()
    seen: set[bytes] = set()
    for number, event in enumerate([*events, ("note", ("end",))]):
        if number and event[0] != "note" and rng.random() >= skip:
            for name, keep, grow in choices(medium.undecided(), rng, random_states):
                state = medium.clone()
                state.cut(keep, grow=grow)
                digest = state.digest() + truth.acked.to_bytes(8, "big")
                if digest not in seen:
                    seen.add(digest)
                    yield number, name, state, truth
        medium.play(event)
        truth.hear(event)


def choices(
    undecided: list[Change | Entry], rng: random.Random, random_states: int
) -> Iterator[tuple[str, Keep, bool]]:
    n = len(undecided)
    masks = {0, (1 << n) - 1}
    if n <= ALL_SUBSETS_UP_TO:
        masks.update(range(1 << n))
    else:
        masks.update(1 << k for k in range(n))
        masks.update(((1 << n) - 1) ^ (1 << k) for k in range(n))
        masks.update((1 << k) - 1 for k in range(n))
        masks.update(rng.getrandbits(n) for _ in range(random_states))
    for mask in sorted(masks):
        yield f"kept {mask:b}", _whole(mask), bool(rng.getrandbits(1))
    for k, change in enumerate(undecided):
        if isinstance(change, Change) and change.data and len(change.data) > SECTOR:
            sectors = [start for start, _ in change.sectors()]
            others = ((1 << n) - 1) ^ (1 << k)
            for mask in (0, others, rng.getrandbits(n) & others):
                for name, kept in _tears(sectors, rng):
                    yield f"kept {mask:b}, {k} torn: {name}", _torn(mask, k, kept), bool(rng.getrandbits(1))


def _tears(sectors: list[int], rng: random.Random) -> Iterator[tuple[str, frozenset[int]]]:
    yield "only the first sector", frozenset(sectors[:1])
    yield "all but the last", frozenset(sectors[:-1])
    yield "all but the first", frozenset(sectors[1:])
    half = rng.randrange(1, len(sectors))
    yield f"the first {half}", frozenset(sectors[:half])
    hole = rng.randrange(len(sectors))
    yield f"all but sector {hole}", frozenset(sectors[:hole] + sectors[hole + 1 :])
    yield "random sectors", frozenset(s for s in sectors if rng.getrandbits(1))


def _whole(mask: int) -> Keep:
    return lambda number, change, sector: bool(mask >> number & 1)


def _torn(mask: int, torn: int, kept: frozenset[int]) -> Keep:
    return lambda number, change, sector: sector in kept if number == torn else bool(mask >> number & 1)


def check_states(
    states: Iterator[tuple[int, str, Medium, Truth]],
    *,
    failures_max: int = 5,
    progress: Callable[[int], None] | None = None,
) -> tuple[int, list[Failure]]:
    """Recover each. Every tenth is cut again after recovery, with all that recovery did not sync lost."""
    failures: list[Failure] = []
    count = 0

    async def main() -> None:
        nonlocal count
        for number, name, medium, truth in states:
            count += 1
            try:
                start, data = await recovered(medium)
                complaint = truth.complaint(start, data)
                if not complaint and count % 10 == 0:
                    medium.cut(lambda *_: False)
                    if await recovered(medium) != (start, data):
                        complaint = "what recovery showed was gone after a second power cut"
            except (ChronikError, AssertionError) as error:
                complaint = f"{type(error).__name__}: {error}"
            if complaint:
                failures.append(Failure(number, name, complaint))
                if len(failures) >= failures_max:
                    return
            if progress is not None:
                progress(count)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return count, failures


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/crash-states",
        description="Record the lives of logs, cut the power at every point of each in every way, recover, compare.",
    )
    parser.add_argument("--lives", type=int, default=5, help="seeds 1 to this (5; about 2,500 states each)")
    parser.add_argument("--seed", type=int, help="only this life")
    parser.add_argument("--random", type=int, default=6, help="random states at each point beside the systematic ones")
    options = parser.parse_args()
    total, began = 0, time.monotonic()
    for seed in [options.seed] if options.seed is not None else range(1, options.lives + 1):
        events = record_life(seed)
        count, failures = check_states(crash_states(events, random.Random(seed), random_states=options.random))
        total += count
        print(f"life {seed}: {len(events)} events, {count} crash states, {len(failures)} failures", flush=True)
        for failure in failures:
            print(f"  before event {failure.event} ({failure.state}): {failure.complaint}")
        if failures:
            print(f"again: scripts/crash-states --seed {seed}")
            return 1
    print(f"{total} crash states in {time.monotonic() - began:.0f} s: nothing acked was lost, nothing was invented")
    return 0


if __name__ == "__main__":
    sys.exit(main())
