"""What the log's tests share: disks to put it on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.wal.workbench import Place, RealPlace, SimPlace


@pytest.fixture(params=["real", "simulated"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A data directory, on the machine and simulated: the same tests run on both."""
    return RealPlace(tmp_path) if request.param == "real" else SimPlace()
