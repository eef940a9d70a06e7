"""The scripts that a person runs: from any directory, twice, two at once; and the lock that they install from."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def environ(folder: Path) -> dict[str, str]:
    """Almost none, as on a new machine."""
    return {"PATH": os.environ["PATH"], "HOME": str(folder), "TMPDIR": str(folder)}


def test_setup_costs_nothing_the_second_time_not_even_two_at_once(tmp_path: Path) -> None:
    command = [str(ROOT / "scripts" / "setup")]
    subprocess.run(command, cwd=tmp_path, env=environ(tmp_path), check=True)
    stamp = ROOT / ".venv" / ".setup-done"
    before = stamp.stat().st_mtime_ns
    both = [subprocess.Popen(command, cwd=tmp_path, env=environ(tmp_path)) for _ in range(2)]
    assert [one.wait(30) for one in both] == [0, 0]
    assert stamp.stat().st_mtime_ns == before, "it was done again"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "scripts").iterdir() if path.is_file()))
def test_every_script_has_help(script: str, tmp_path: Path) -> None:
    command = [str(ROOT / "scripts" / script), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environ(tmp_path), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 40, done.stdout


def test_an_unknown_part_is_said_with_those_that_there_are(tmp_path: Path) -> None:
    command = [str(ROOT / "scripts" / "test"), "wall"]
    done = subprocess.run(command, cwd=tmp_path, env=environ(tmp_path), capture_output=True, text=True)
    assert done.returncode == 2
    assert "parts are: replication kafka spark wal house check" in done.stderr


def test_the_lock_pins_everything_by_hash_and_names_no_host() -> None:
    for name in ("requirements.lock", "requirements-java.lock"):
        text = (ROOT / name).read_text()
        assert not re.search(r"https?:|index-url|find-links|file:", text)
        blocks = re.split(r"\n(?=\S)", text.strip())
        for block in blocks:
            assert re.match(r"[a-z0-9._-]+(\[[a-z,]+\])?==[^\s;]+", block), block[:80]
            assert "--hash=sha256:" in block, block[:80]


def test_the_lock_covers_what_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = project["project"]["dependencies"] + project["dependency-groups"]["dev"]
    for extra in project["project"]["optional-dependencies"].values():
        asked += extra
    names = {re.split(r"[\[<>=!~ ;]", one)[0].lower() for one in asked} - {"chronik-repl"}
    locked = set(re.findall(r"(?m)^([a-z0-9._-]+?)(?:\[[a-z,]+\])?==", (ROOT / "requirements.lock").read_text()))
    assert names - locked == set(), "run scripts/lock"
