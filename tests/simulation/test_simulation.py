"""The simulator in CI: 200 seeds, the same trace in two processes, and every planted bug caught again."""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import trio._core._run as trio_run

from tests.simulation.__main__ import first, one, table, told
from tests.simulation.bugs import BUGS, CAUGHT
from tests.simulation.run import Outcome, simulate

SEEDS = 200
REPLAYS = 100
PROCESSES = min(4, os.cpu_count() or 1)
TRACE = "from tests.simulation.run import simulate; print(simulate({seed}).trace_hash)"


def _all(work: list[tuple[int, str | None]]) -> list[Outcome]:
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        return list(pool.imap_unordered(one, work))


def test_nothing_breaks_in_many_seeds() -> None:
    outcomes = _all([(seed, None) for seed in range(1, SEEDS + 1)])
    broken = [outcome for outcome in outcomes if outcome.verdicts]
    assert not broken, "\n".join(map(told, broken)) + "\n" + "\n".join(broken[0].transcript[-100:])
    assert all(outcome.appended >= 200 for outcome in outcomes)
    assert all(len(outcome.troubles) >= 5 for outcome in outcomes)


def test_the_same_seed_gives_the_same_trace_in_two_processes() -> None:
    def trace(hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", TRACE.format(seed=7)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    here, there = trace("1"), trace("2")
    assert len(here) == 32
    assert here == there
    assert simulate(8).trace_hash != here


def test_canary_trio_still_has_the_names_that_determinism_needs() -> None:
    assert isinstance(trio_run._ALLOW_DETERMINISTIC_SCHEDULING, bool)
    assert isinstance(trio_run._r, random.Random)


def test_the_table_names_every_planted_bug_and_its_seed() -> None:
    assert set(CAUGHT) == set(BUGS), "each was caught"
    page = Path(__file__).parents[2].joinpath("docs", "reliability.md").read_text()
    assert "\n".join(table()) in page, "scripts/simulate --table"


def test_planted_bugs_are_caught_again() -> None:
    """A change of the production's timing tells other stories, so the seeds after it count too."""
    work = [(bug, seed, REPLAYS) for bug, seed in CAUGHT.items()]
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        missed = [bug for bug, outcome in pool.imap_unordered(first, work) if outcome is None]
    assert not missed, f"no longer caught within {REPLAYS} seeds (scripts/simulate --search): {missed}"


@pytest.mark.parametrize("bug", ["ack-before-sync", "acks-all-is-local"])
def test_a_planted_bug_leaves_nothing_behind(bug: str) -> None:
    assert simulate(CAUGHT[bug], bug=bug).verdicts
    assert not simulate(CAUGHT[bug]).verdicts
