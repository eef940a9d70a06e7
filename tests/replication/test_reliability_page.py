"""docs/reliability.md names a test for every known failure, and every test that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "reliability.md"
FAILURES = {*range(1, 38), *range(45, 61)}  # 38 to 44 are of a source that this version does not have


def rows() -> dict[int, list[str]]:
    """Of the table of known failures: number → the tests that it names."""
    section = PAGE.read_text().partition("\n## Known failures\n")[2].partition("\n## ")[0]
    found = re.findall(r"(?m)^\| (\d+) [^|]+\| ([^|]+) \|$", section)
    return {int(number): re.findall(r"`([^`]+)`", tests) for number, tests in found}


def test_every_known_failure_has_a_test() -> None:
    table = rows()
    assert set(table) == FAILURES
    assert all(table.values()), [number for number, tests in table.items() if not tests]


def test_every_test_that_the_page_names_is_there() -> None:
    sources = {file: file.read_text() for file in TESTS.rglob("*.py")}
    everything = "\n".join(sources.values())
    named = re.findall(r"`(test_\w+)(?:\[([^\]`]+)\])?`", PAGE.read_text())
    assert len(named) > len(FAILURES)
    for name, case in named:
        assert re.search(rf"(?m)^ *(async )?def {name}\(", everything), name
        if case:
            assert f'"{case}"' in everything, f"{name}[{case}]"
