"""The scripts that a person runs: from any directory, twice, two at once; and the lock that they install from."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
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


def test_an_unknown_part_is_said_with_those_that_there_are(tmp_path: Path) -> None:
    command = [str(ROOT / "scripts" / "test"), "wall"]
    done = subprocess.run(command, cwd=tmp_path, env=environ(tmp_path), capture_output=True, text=True)
    assert done.returncode == 2
    assert "parts are: check wal replication kafka spark house" in done.stderr


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


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=lambda how: how.name)
def test_a_demo_that_is_stopped_takes_its_nodes_with_it(how: signal.Signals, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [str(ROOT / "scripts" / "demo")], cwd="/", env=environ(tmp_path), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "look at it" in line:
            break
    assert nodes_in(tmp_path), "the nodes run"
    process.send_signal(how)
    process.stdout.read()
    assert process.wait(30) == (-9 if how == signal.SIGKILL else 130)
    deadline = time.monotonic() + 10
    while nodes_in(tmp_path):
        assert time.monotonic() < deadline, "a node was left behind"
        time.sleep(0.05)
    if how != signal.SIGKILL:  # nobody can tidy up after that
        assert list(tmp_path.iterdir()) == []


def nodes_in(folder: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"CHRONIK_DATA_DIR={folder}".encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue  # it has ended, or is not ours
    return found
