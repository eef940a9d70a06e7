"""`scripts/simulate`: many seeds on all cores, one seed with its transcript, or the search for planted bugs."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable

from tests.simulation.bugs import BUGS, CAUGHT
from tests.simulation.run import Outcome, simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, metavar="N", help="how many (default 200)")
    parser.add_argument("--start", type=int, default=1, metavar="S", help="the first one")
    parser.add_argument("--seed", type=int, metavar="S", help="only this one, with its transcript")
    parser.add_argument("--lines", type=int, default=400, help="of the transcript")
    parser.add_argument("--bug", choices=sorted(BUGS), help="plant this bug: the seeds must catch it")
    parser.add_argument("--search", action="store_true", help="for every planted bug, the first seed that catches it")
    parser.add_argument("--table", action="store_true", help="the planted bugs as docs/reliability.md shows them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    if asked.seed is not None:
        outcome = simulate(asked.seed, bug=asked.bug, lines=asked.lines, always_transcript=True)
        print("\n".join(outcome.transcript))
        print(told(outcome))
        return int(bool(outcome.verdicts) != (asked.bug is not None))
    if asked.table:
        print("\n".join(table()))
        return 0
    if asked.search:
        return search([asked.bug] if asked.bug else sorted(BUGS), asked.start, asked.seeds, asked.jobs)
    return run(range(asked.start, asked.start + asked.seeds), asked.bug, asked.jobs)


def run(seeds: Iterable[int], bug: str | None, jobs: int) -> int:
    """0 when every seed holds; with a bug, when one of them caught it."""
    began, failed, count, cpu_s = time.monotonic(), list[Outcome](), 0, 0.0
    with multiprocessing.Pool(jobs, maxtasksperchild=50) as pool:
        for outcome in pool.imap_unordered(one, [(seed, bug) for seed in seeds]):
            count += 1
            cpu_s += outcome.cpu_s
            if outcome.verdicts:
                failed.append(outcome)
                print(told(outcome), flush=True)
                if bug:
                    pool.terminate()
                    break
            elif sys.stderr.isatty():
                print(f"\r{count} seeds hold", end="", file=sys.stderr)
    took = time.monotonic() - began
    print(f"{count} seeds, {len(failed)} broken; {count / took:.1f} a second, {count / cpu_s:.1f} a second a core")
    if bug:
        return int(not failed)
    for outcome in failed[:1]:
        print("\n".join(outcome.transcript))
    return int(bool(failed))


def search(bugs: list[str], start: int, seeds: int, jobs: int) -> int:
    missed = 0
    with multiprocessing.Pool(jobs, maxtasksperchild=50) as pool:
        for bug, found in pool.imap_unordered(first, [(bug, start, seeds) for bug in bugs]):
            if found is None:
                missed += 1
                print(f"{bug}: not caught in {seeds} seeds", flush=True)
            else:
                known = CAUGHT.get(bug)
                print(f'    "{bug}": {found.seed},  # {found.verdicts[0][:110]} (known: {known})', flush=True)
    return int(bool(missed))


def table() -> list[str]:
    head = ["| bug | what it breaks | known failure | seed |", "|---|---|---|---|"]
    return head + [
        f"| `{name}` | {bug.what} | {', '.join(map(str, bug.failures))} | {CAUGHT.get(name, 'not caught yet')} |"
        for name, bug in BUGS.items()
    ]


def one(what: tuple[int, str | None]) -> Outcome:
    return simulate(what[0], bug=what[1])


def first(what: tuple[str, int, int]) -> tuple[str, Outcome | None]:
    bug, start, seeds = what
    for seed in range(start, start + seeds):
        outcome = simulate(seed, bug=bug)
        if outcome.verdicts:
            return bug, outcome
    return bug, None


def told(outcome: Outcome) -> str:
    lines = [
        f"seed {outcome.seed}: {'; '.join(outcome.verdicts) or 'holds'}",
        f"    {outcome.appended} appends, {outcome.acked} acked, {outcome.commits} moves of a high watermark, "
        f"{outcome.messages} messages, {outcome.reads} reads, {outcome.simulated_s:.0f} s; trace {outcome.trace_hash}",
        *(f"    {trouble}" for trouble in outcome.troubles),
    ]
    if outcome.verdicts:
        lines.append(f"    again, with its transcript: scripts/simulate --seed {outcome.seed}{outcome.with_bug}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
