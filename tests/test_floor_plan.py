"""The house rules, kept by a test: who may import whom, what may stand where, and how long a file may be."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "chronik_repl"
LINES_MAX = 500

# Data flows one way: source → wal → ring → wire → wal → reader → parity. A room may import itself, the ground floor,
# and these.
GROUND = {"positions", "errors", "words", "columns"}
ROOMS = {
    "wal": set[str](),
    "replication": {"wal", "addresses", "identity", "standing", "config", "listening"},
    "kafka": {"wal", "standing", "meters", "config", "values", "addresses", "listening"},
    "http": {
        "standing",
        "meters",
        "tables",
        "config",
        "addresses",
        "listening",
        "wal.values",
    },  # of the log only how it counts
    "spark": {"wal.frame", "wal.segment", "wal.records"},  # the layouts, and Kafka's own record format
    "postgres": {"wal", "standing", "meters", "config", "addresses"},
}
# Deciding is apart from doing: no clock, no chance, no I/O here.
PURE = (
    "positions",
    "errors",
    "words",
    "wal.frame",
    "wal.segment",
    "wal.changes",
    "wal.ages",
    "wal.state",
    "wal.entities",
    "wal.recovery",
    "wal.snapshot",
    "wal.index",
    "wal.intake",
    "wal.retention",
    "replication.ring",
    "replication.messages",
    "replication.epochs",
    "replication.progress",
    "kafka.groups",
)
IMPURE = {"trio", "socket", "os", "io", "time", "random", "threading", "subprocess", "pathlib", "select", "asyncio"}
# The calls that make or unmake durability. On the log's files they belong to the disk alone.
DURABLE_CALLS = {"fsync", "fdatasync", "rename", "replace", "truncate", "ftruncate", "sync_file_range"}
MAY_SYNC = {
    "wal.disk": "the seam itself",
    "backup": "writes a copy, which no node has open",
    "kafka.users": "the users' file, which is not the log's",
    "spark.proved": "what a parity run has proved, which is not the log's",
}
VAGUE = re.compile(r"(^|_)(utils?|helpers?|managers?|common|misc|base)(_|$)")


def modules(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def name_of(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports by dots; write the whole name"
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def ours(imported: str) -> str | None:
    head, _, rest = imported.partition(".")
    return rest if head == "chronik_repl" and rest else None


def is_module(name: str) -> bool:
    return (PACKAGE / f"{name}.py").exists() or (PACKAGE / name).is_dir()


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_imports_only_what_it_may(room: str) -> None:
    allowed = ROOMS[room] | GROUND | {room}
    wrong = []
    for path in modules(PACKAGE / room) if (PACKAGE / room).is_dir() else []:
        for line, imported in imports_of(path):
            name = ours(imported)
            if (
                name is not None
                and (PACKAGE / name.split(".")[0]).with_suffix(".py").exists() | (PACKAGE / name.split(".")[0]).is_dir()
            ):
                known = any(name == one or name.startswith(one + ".") or one.startswith(name + ".") for one in allowed)
                if not known:
                    wrong.append(f"{path.relative_to(ROOT)}:{line} imports {imported}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", PURE)
def test_what_decides_touches_nothing(module: str) -> None:
    path = PACKAGE / (module.replace(".", "/") + ".py")
    found = [f"line {line}: {name}" for line, name in imports_of(path) if name.split(".")[0] in IMPURE]
    assert not found, f"{module}: {found}"


def test_durability_is_made_in_few_places() -> None:
    wrong = []
    for path in modules(PACKAGE):
        if name_of(path) in MAY_SYNC:
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in DURABLE_CALLS:
                owner = node.func.value
                if isinstance(owner, ast.Name) and owner.id == "os":
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} os.{node.func.attr}")
    assert not wrong, "\n".join(wrong)


def catches_everything(node: ast.AST) -> bool:
    if not isinstance(node, ast.ExceptHandler):
        return False
    names = {one.id for one in ast.walk(node.type) if isinstance(one, ast.Name)} if node.type else {"BaseException"}
    return bool(names & {"Exception", "BaseException"})


def test_nobody_catches_everything() -> None:
    """But to tidy up and raise it again. A test may also look at what it caught."""
    wrong = []
    for folder in (PACKAGE, ROOT / "tests"):
        for path in modules(folder):
            for node in filter(catches_everything, ast.walk(tree_of(path))):
                assert isinstance(node, ast.ExceptHandler)
                raised_again = any(isinstance(one, ast.Raise) for one in node.body)
                looked_at = any(isinstance(one, ast.Name) and one.id == node.name for one in ast.walk(node))
                if not raised_again and not (folder != PACKAGE and looked_at):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, "\n".join(wrong)


def test_every_module_opens_with_its_story_and_fits_in_the_head() -> None:
    wrong = []
    for folder in (PACKAGE, ROOT / "tests"):
        for path in modules(folder):
            lines = len(path.read_text().splitlines())
            if lines > LINES_MAX:
                wrong.append(f"{path.relative_to(ROOT)} has {lines} lines")
            if lines and not ast.get_docstring(tree_of(path)):
                wrong.append(f"{path.relative_to(ROOT)} has no docstring")
            if VAGUE.search(path.stem):
                wrong.append(f"{path.relative_to(ROOT)} does not say what it is")
    for path in (ROOT / "scripts").iterdir():
        lines = len(path.read_text().splitlines()) if path.is_file() else 0
        if lines > LINES_MAX:
            wrong.append(f"{path.relative_to(ROOT)} has {lines} lines")
    assert not wrong, "\n".join(wrong)


def test_nothing_stands_twice() -> None:
    """Two functions with the same body, names and all, are one function too many."""
    bodies = defaultdict(list)
    for folder in (PACKAGE, ROOT / "tests"):
        for path in modules(folder):
            for node in ast.walk(tree_of(path)):
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                if sum(1 for _ in ast.walk(node)) >= 60:
                    body = "".join(ast.dump(statement) for statement in node.body)
                    bodies[body].append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    twice = [" = ".join(places) for places in bodies.values() if len(places) > 1]
    assert not twice, "\n".join(twice)


def test_module_level_holds_no_state() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in modules(PACKAGE)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Global)
    ]
    assert not wrong, wrong


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git tree: which files belong to it is not known")
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_the_tree_names_no_machine_and_no_registry() -> None:
    elsewhere = re.compile(r"(?<![\w.])/(work|root|home/\w+)/|pythonhosted\.org|pypi\.org|npmjs\.org|repo1?\.maven")
    wrong = []
    for path in tracked():
        if path == Path(__file__) or not path.is_file():
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if elsewhere.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number} {line.strip()[:100]}")
    assert not wrong, "\n".join(wrong)


def test_decisions_have_numbers_of_their_own() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    numbers = [page.name[:4] for page in pages]
    assert len(set(numbers)) == len(numbers), numbers
    for page in pages:
        assert page.read_text().startswith(f"# {page.name[:4]} "), page.name


def test_nothing_is_left_for_later() -> None:
    later = re.compile(r"\b(TODO|FIXME|XXX)\b")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked()
        if path.suffix in (".py", ".md", ".html") and path != Path(__file__) and path.is_file()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if later.search(line)
    ]
    assert not wrong, wrong


def test_every_folder_of_tests_belongs_to_a_part() -> None:
    script = (ROOT / "scripts" / "test").read_text()
    for folder in sorted((ROOT / "tests").iterdir()):
        if folder.is_dir() and any(folder.glob("test_*.py")):
            assert re.search(rf"\btests/{folder.name}\b", script), f"no part of scripts/test runs tests/{folder.name}"
