"""10⁵ mutated inputs for each parser: declared errors only, bounded memory. `scripts/fuzz` does 10⁷."""

from __future__ import annotations

import pytest

from tests.crash.fuzz import fuzz, targets


@pytest.mark.parametrize("name", list(targets()))
def test_mutated_bytes_raise_declared_errors_only(name: str) -> None:
    found = fuzz(name, 100_000, seed=1)
    assert found.refused > 1000, "the mutations do something"
    assert found.accepted > 100, "and get past the checksums"
    assert found.grown_mb < 200
