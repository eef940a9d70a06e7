"""Real processes, real faults; hundreds of rounds by scripts/chaos."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.end_to_end.chaos import Chaos
from tests.end_to_end.namespaces import available


def test_chaos_of_thirty_rounds(tmp_path: Path) -> None:
    with Chaos(tmp_path, seed=int(os.environ.get("CHRONIK_CHAOS_SEED", "7")), rounds=30, hold=0.5) as chaos:
        chaos.run()
        assert set(chaos.counts) == {fault.__name__ for fault in chaos.faults()}, "every kind of fault was among them"


def test_cut_networks_and_full_disks_were_among_them() -> None:
    if why := available():
        pytest.skip(f"the chaos above ran without cut networks and full disks: {why}")
