"""What every benchmark says, and how: a table, and with `--json FILE` the same as an object.

report = Report("wal", options)             options = arguments("wal", "What it measures.").parse_args()
report.limit("fdatasync", 0.07, "ms")       what the machine itself can do
report.add("append to durable", 0.31, "ms", reference=0.07, ratio=..., bar="<= 0.27 ms", ok=True)
sys.exit(report.finish())                   1 if a bar is missed
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent


class Result(NamedTuple):
    name: str
    value: float
    unit: str
    reference: float | None
    ratio: float | None
    bar: str | None
    ok: bool | None


def arguments(name: str, what: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"scripts/bench {name}", description=what)
    parser.add_argument("--quick", action="store_true", help="smaller loads, under a minute")
    parser.add_argument("--json", metavar="FILE", help="write the results there too, as JSON")
    return parser


class Report:
    def __init__(self, bench: str, options: argparse.Namespace) -> None:
        self.bench = bench
        self.json_file: str | None = options.json
        self.results: list[Result] = []
        self.limits: list[dict[str, Any]] = []

    def limit(self, name: str, value: float, unit: str) -> None:
        """What this machine can do at most: to be read beside the results."""
        self.limits.append({"name": name, "value": round(value, 6), "unit": unit})

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        reference: float | None = None,
        ratio: float | None = None,
        bar: str | None = None,
        ok: bool | None = None,
    ) -> None:
        if ratio is None and reference:
            ratio = value / reference
        self.results.append(Result(name, value, unit, reference, ratio, bar, ok))

    def at_least(self, name: str, value: float, unit: str, reference: float, bar: float) -> None:
        """The value must be at least `bar` times the reference."""
        self.add(name, value, unit, reference=reference, bar=f"ratio >= {bar}", ok=value >= bar * reference)

    def at_most(self, name: str, value: float, unit: str, reference: float, bar: float) -> None:
        """The value must be at most `bar` times the reference."""
        self.add(name, value, unit, reference=reference, bar=f"ratio <= {bar}", ok=value <= bar * reference)

    def finish(self) -> int:
        self._print()
        if self.json_file:
            whole = {
                "bench": self.bench,
                "machine": machine() | {"limits": self.limits},
                "results": [_rounded(result) for result in self.results],
            }
            Path(self.json_file).write_text(json.dumps(whole, indent=2) + "\n")
        return 1 if any(result.ok is False for result in self.results) else 0

    def _print(self) -> None:
        console = Console(width=None if sys.stdout.isatty() else 140)
        facts = machine()
        console.print(f"[bold]{self.bench}[/] on {facts['cores']} × {facts['cpu']}, {facts['memory_gb']} GB, "
                      f"Linux {facts['kernel']}, Python {facts['python']}", highlight=False)  # fmt: skip
        for limit in self.limits:
            console.print(f"  this machine: {limit['name']} {_short(limit['value'])} {limit['unit']}", highlight=False)
        table = Table("", "value", "unit", "reference", "ratio", "bar", "")
        for column in table.columns[1:5]:
            column.justify = "right"
        for result in self.results:
            verdict = {None: "", True: "[green]ok[/]", False: "[red]missed[/]"}[result.ok]
            table.add_row(
                result.name, _short(result.value), result.unit, _short(result.reference), _short(result.ratio),
                result.bar or "", verdict,
            )  # fmt: skip
        console.print(table)


def machine() -> dict[str, Any]:
    return {
        "cpu": next(
            (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
            platform.machine(),
        ),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
    }


def compile_c(name: str, folder: str, *more: str) -> str:
    """scripts/benchmarks/NAME.c as a program in `folder`: the bare loop that a result is compared with, or a client."""
    program = str(Path(folder) / name)
    subprocess.run(["cc", "-O2", "-pthread", "-o", program, str(HERE / f"{name}.c"), *more], check=True)
    return program


def is_filled(path: Path, size: int) -> bool:
    """Was all of it written? Space that is reserved and was never written counts as a hole."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size >= size and os.lseek(file.fileno(), 0, os.SEEK_HOLE) >= size
    except FileNotFoundError:
        return False


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """On the disk that holds the project, not on a tmpfs: CHRONIK_BENCH_DIR names another place."""
    parent = os.environ.get("CHRONIK_BENCH_DIR") or Path.cwd() / ".bench"
    os.makedirs(parent, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix="bench-", dir=parent)


def _rounded(result: Result) -> dict[str, Any]:
    fields = result._asdict()
    for name in ("value", "reference", "ratio"):
        if fields[name] is not None:
            fields[name] = float(f"{fields[name]:.5g}")
    return fields


def _short(number: float | None) -> str:
    if number is None:
        return ""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
