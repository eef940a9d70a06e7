"""`chronik config`: every variable, its value and where it came from; or a file, checked as a node would read it."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chronik_repl.errors import ConfigError

EXAMPLES = """examples:
  chronik config                              what a node started from this shell would use
  chronik config /etc/chronik/leader.env      the same of a file: exit code 0 if it is right, 2 if not
  chronik config follower.env --as follower --json
  chronik config --markdown                   the table of docs/configuration.md"""
LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)")


def register(subcommands: Any) -> None:
    parser = subcommands.add_parser(
        "config",
        help="every variable, its value and where it came from; checks a file",
        description="Every variable, its value and where it came from; checks a file.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", nargs="?", type=Path, help="an environment file (NAME=value lines)")
    parser.add_argument(
        "--as", dest="program", choices=("leader", "follower"), default="leader", help="for which program (leader)"
    )
    parser.add_argument("--json", action="store_true", help="the variables, and what is wrong, as one object")
    parser.add_argument("--markdown", action="store_true", help="only the table of names, defaults and meanings")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from chronik_repl.config import VARIABLES, load
    from chronik_repl.values import show

    if arguments.markdown:
        print(markdown(), end="")
        return 0
    environ: Mapping[str, str] = os.environ if arguments.file is None else read_file(arguments.file)
    settings, wrong = None, ""
    try:
        settings = load(environ, arguments.program, check_files=arguments.file is None)
    except ConfigError as error:
        wrong = str(error)
    rows = []
    for variable in VARIABLES:
        given = bool(environ.get(variable.name, "").strip())
        value = getattr(settings, variable.field) if settings else environ.get(variable.name)
        if not settings and not given:
            value = None if variable.required else variable.default_for(arguments.program)
        source = (str(arguments.file) if arguments.file else "environment") if given else "default"
        shown = show(value) if given and not settings else ("" if value is None else variable.show(value))
        if not given and variable.required:
            source = "missing"
        rows.append({"name": variable.name, "value": shown, "from": source, "meaning": variable.rule.meaning})
    if arguments.json:
        print(json.dumps({"variables": rows, "ok": not wrong, "errors": wrong.splitlines()}, indent=2))
    else:
        _show(rows)
    if wrong:
        if arguments.json:
            return 2
        raise ConfigError(wrong)
    return 0


def _show(rows: list[dict[str, str]]) -> None:
    """With the meanings where there is room for them."""
    from rich.text import Text

    from chronik_repl.columns import fits, table, terminal

    console = terminal()
    names: tuple[str, ...] = ("name", "value", "from", "meaning")
    grid = [[Text(row[name], "dim" if row["from"] == "default" else "") for name in names] for row in rows]
    if not fits(names, grid, console.width):
        names, grid = names[:3], [row[:3] for row in grid]
    console.print(table(names, grid, console.width))


def markdown() -> str:
    """The table for docs/configuration.md; a test keeps the two the same."""
    from chronik_repl.config import VARIABLES

    lines = ["| variable | type | default | meaning |", "|---|---|---|---|"]
    for variable in VARIABLES:
        default = "(must be set)" if variable.required else f"`{variable.show(variable.default)}`"
        if variable.field == "wal_receiver_enabled":
            default = "`true` in chronik-follower, `false` in chronik-leader"
        elif default == "``":
            default = "(none)"
        kind = variable.rule.kind.replace("|", "\\|")
        lines.append(f"| `{variable.name}` | {kind} | {default} | {variable.rule.meaning} |")
    return "\n".join(lines) + "\n"


def read_file(path: Path) -> dict[str, str]:
    """NAME=value lines as systemd's EnvironmentFile reads them. Raises ConfigError with the line's number."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}. Give a file like those in config/.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not text in UTF-8 (byte {error.start}). Give a file like those in config/."
        ) from error
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line[0] in "#;":
            continue
        match = LINE.fullmatch(line)
        if match is None:
            raise ConfigError(f"{path}, line {number}: NAME=value is expected, not {line!r}.")
        value = match[2].strip()
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        found[match[1]] = value
    return found
