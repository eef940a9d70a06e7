"""What the documents say is so: the README's commands run, and links lead somewhere."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from chronik_repl.cli import build_parser
from chronik_repl.config import VARIABLES
from tests.ports import free_port

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
EXAMPLES = sorted(path for path in ROOT.glob("config/**/*.*") if path.suffix != ".json")
PORTS = ("9092", "9093", "9291", "9292", "9644", "9645")
TIMEOUT_S = 400  # for a machine that has other things to do


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def test_the_readme_has_the_two_commands_first() -> None:
    assert [block.strip() for block in blocks(ROOT / "README.md")[:2]] == ["scripts/demo", "scripts/test"]


def test_every_other_command_of_the_readme_runs_as_written(tmp_path: Path) -> None:
    """In one shell, from top to bottom; only the ports are others, so that it can run beside anything."""
    if shutil.which("kcat") is None:
        pytest.skip("no kcat on this machine (apt-get install kcat)")
    script = "\n".join(blocks(ROOT / "README.md")[2:])
    ports = {port: str(free_port()) for port in PORTS}
    script = re.sub("|".join(PORTS), lambda match: ports[match[0]], script)
    assert not re.search(r"(?m)^\s*(rm|sudo|curl|git)\b", script)
    for name in (".venv", "config"):
        (tmp_path / name).symlink_to(ROOT / name)
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
        # What the commands leave to their defaults.
        "CHRONIK_HTTP_BIND_ADDR": f"127.0.0.1:{ports['9644']}",
        "CHRONIK_KAFKA_BIND_ADDR": f"127.0.0.1:{ports['9092']}",
        "CHRONIK_WAL_RECEIVER_BIND_ADDR": f"127.0.0.1:{ports['9291']}",
        "CHRONIK_MIN_FREE_BYTES": "64MiB",
    }
    shell = f"set -euo pipefail -m\ntrap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\n{script}\nwait\n"
    done = subprocess.run(
        ["bash", "-c", shell], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    assert "\n1000\n" in f"\n{done.stdout}", told
    assert "numbers" in done.stdout, "chronik topics"
    assert "copies are the same" in done.stdout, told


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:src|srcset)=\"([^\"]+)\"", text)
    for target in targets:
        if not re.match(r"https?:|#", target):
            path = (page.parent / target.partition("#")[0]).resolve()
            assert path.exists(), f"{page.relative_to(ROOT)} → {target}"


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_are_there(page: Path) -> None:
    for name in re.findall(r"(?<![\w/.-])((?:chronik_repl|tests|scripts|config|docs)/[\w./-]*\w)", page.read_text()):
        assert (ROOT / name).exists(), f"{page.relative_to(ROOT)} names {name}"


def commands(text: str) -> list[str]:
    """As they stand in backticks (perhaps over two lines), in blocks and in the comments of config/."""
    found = re.findall(r"`(chronik [^`\n]*(?:\n[^`\n]*)?)`", text)
    found += re.findall(r"(?m)^(?:.*\s\s)?(chronik [^`\n#]*)$", text) + re.findall(r": (chronik [^`\n]*)$", text)
    return [" ".join(one.replace("…", "").rstrip("&").split()) for one in found]


@pytest.mark.parametrize("page", [*DOCUMENTS, *EXAMPLES], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_variables_that_are_named_are_there(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = page.read_text()
    unknown = set(re.findall(r"\bCHRONIK_[A-Z_]*[A-Z]\b", text)) - {variable.name for variable in VARIABLES}
    assert unknown == set()
    for command in commands(text):
        words = shlex.split(command.partition(" > ")[0])[1:]
        named = len(words) <= 2 and "the following arguments are required" in complaint(words, capsys)
        assert named or not complaint(words, capsys), command  # named: not to be typed as it stands


def complaint(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with contextlib.suppress(SystemExit):
        build_parser().parse_args(words)
    return capsys.readouterr().err


def test_the_architecture_names_every_room_and_module_of_the_top_floor() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = re.findall(r"`([a-z_]+(?:\.py|/))`", page.partition("## The rooms")[2].partition("\n## ")[0])
    package = ROOT / "chronik_repl"
    there = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()}
    there |= {path.name for path in package.glob("*.py")} - {"__init__.py"}
    assert set(table) - {"test_floor_plan.py"} == there


def test_every_page_is_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [page.name for page in ROOT.glob("docs/*.md") if f"(docs/{page.name})" not in readme] == []
    assert [
        page.name for page in ROOT.glob("*.md") if page.name != "README.md" and f"({page.name})" not in readme
    ] == []


def test_help_names_every_command() -> None:
    """Examples of each: test_commands.py."""
    names = re.findall(r"(?m)^    ([a-z]+) ", build_parser().format_help())
    wanted = {"status", "topics", "groups", "members", "promote", "backup", "certs", "users", "wal", "parity", "config"}
    assert set(names) == wanted
