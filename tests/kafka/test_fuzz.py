"""Ten thousand mutated requests of every API: an answer or a closed connection, and nothing else."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import structlog

from chronik_repl.kafka import topics

from .fuzz import MIB, fuzz

REQUESTS = 10_000
GROWTH_BYTES_MAX = 300 * MIB


async def test_mutated_requests_of_every_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics, "PARTITIONS_MAX", 2_000)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    try:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        answered = await fuzz(REQUESTS, 1, tmp_path)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    finally:
        structlog.reset_defaults()
    assert len(answered) >= 24
    for name, count in answered.items():
        assert count > REQUESTS / 50, f"{name}: the fuzzer hardly gets past the decoder"
    assert after - before < GROWTH_BYTES_MAX
