"""Where promtool is: `scripts/setup tests` fetches it into .venv; a machine may have its own."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest


def promtool() -> str:
    """Skips the test where there is none."""
    program = shutil.which("promtool") or shutil.which("promtool", path=Path(sys.executable).parent)
    if program is None:
        pytest.skip("no promtool on this machine (scripts/setup tests fetches it; or apt-get install prometheus)")
    return program
