"""The wheel and the sdist carry everything, and what they install runs without the source tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from chronik_repl import __version__

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both, made from the tree; and the wheel once more from the sdist alone, as an index would."""
    folder = tmp_path_factory.mktemp("built")
    build = [sys.executable, "-m", "uv", "build", "-q", "--offline", "--no-build-isolation", "--python", sys.executable]
    subprocess.run([*build, "--sdist", "--wheel", "-o", str(folder), str(ROOT)], check=True)
    (sdist,) = folder.glob("*.tar.gz")
    subprocess.run([*build, "--wheel", "-o", str(folder / "again"), str(sdist)], check=True)
    return folder


def members(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("RECORD")}


def test_the_wheel_has_everything_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = members(wheel)
    assert {"chronik_repl/http/page.html", "chronik_repl/py.typed", "chronik_repl/spark/__init__.py"} <= names
    assert not [name for name in names if name.startswith(("tests", "docs")) or "__pycache__" in name]
    (again,) = (built / "again").glob("*.whl")
    assert members(again) == names


def test_the_sdist_can_be_tested(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for needed in ("README.md", "LICENSE", "requirements.lock", "scripts/test", "tests/test_packaging.py"):
        assert needed in names


def test_what_it_says_of_itself(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith("METADATA"))
        said = Parser().parsestr(archive.read(name).decode())
    assert said["Version"] == __version__
    assert said["License-Expression"] == "Apache-2.0"
    assert set(said.get_all("Provides-Extra") or ()) == {"spark", "demo"}


def test_it_runs_in_a_clean_environment(built: Path, tmp_path: Path) -> None:
    """The wheel in an environment of its own; its dependencies are borrowed, so that no index is needed."""
    (wheel,) = built.glob("*.whl")
    place = tmp_path / "clean"
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "-q", "--offline", "--python", sys.executable, str(place)], check=True)
    python = place / "bin" / "python"
    subprocess.run(
        [*uv, "pip", "install", "-q", "--offline", "--no-deps", "--python", str(python), str(wheel)], check=True
    )
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}

    def run(*command: str) -> str:
        done = subprocess.run(
            [place / "bin" / command[0], *command[1:]], cwd=tmp_path, env=environ, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run("python", "-c", "import chronik_repl; print(chronik_repl.__file__)")
    assert Path(where.strip()).is_relative_to(place), "the tree's own package was imported"
    assert run("chronik-leader", "--version") == f"chronik-repl {__version__}\n"
    assert run("chronik-follower", "--version") == f"chronik-repl {__version__}\n"
    assert __version__ in run("chronik", "--version")
    (tmp_path / "one.env").write_text("CHRONIK_NODE_ID=1\nCHRONIK_DATA_DIR=data\n")
    assert json.loads(run("chronik", "config", "one.env", "--json"))["ok"] is True
