"""Rows and pairs for a terminal of any width. No address, path or id is ever broken: a line ends between two words (or
two items of a list), or is longer than the terminal.

A table that is too wide becomes one with its first column as headings. Rows that are too wide even then become lines of
"name  value"; so do all, where most would. What goes into a pipe is a table however wide it is: a program reads it, or
`less -S`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

GAP, INDENT = 2, 2
VALUE_LEAST = 24  # beside its name; where there is less room it stands below
ANY_WIDTH = 1 << 16

ITEMS = re.compile(r".*?,(?!\d{3}(?![\w.:]))|.+", re.DOTALL)  # the comma in 1,234 ends none

Cell = str | Text


def terminal() -> Console:
    """Standard output."""
    known = sys.stdout.isatty() or os.environ.get("COLUMNS")
    return Console(width=None if known else ANY_WIDTH, soft_wrap=True, highlight=False)


def table(
    names: Sequence[str], rows: Iterable[Sequence[Cell]], width: int, *, numbers: frozenset[str] = frozenset()
) -> Text:
    """`numbers`: the columns that stand to the right."""
    grid = [[Text(name, "dim") for name in names], *([_text(cell) for cell in row] for row in rows)]
    right = [name in numbers for name in names]
    whole = _aligned(grid, right)
    if _widest(whole) <= width:
        return _together(whole)
    narrow = [sum(cell.cell_len + GAP for cell in row[1:]) - GAP + INDENT <= width for row in grid]
    rest = _aligned([row[1:] for row, good in zip(grid, narrow, strict=True) if good], right[1:])
    if narrow[0] and 2 * sum(narrow) > len(grid) and _widest(rest) + INDENT <= width:
        below = iter(rest)
        lines, heading = [_indented(next(below))], ""
        for row, good in zip(grid[1:], narrow[1:], strict=True):
            lines += [row[0]] if row[0].plain != heading else []
            heading = row[0].plain
            rows_lines = [next(below)] if good else pairs(_named(names[1:], row[1:]), width - INDENT).split()
            lines += [_indented(line) for line in rows_lines]
        return _together(lines)
    return Text("\n\n").join(pairs(_named(names, row), width) for row in grid[1:])


def _named(names: Sequence[str], row: Sequence[Text]) -> list[tuple[str, Cell]]:
    return [(name, cell) for name, cell in zip(names, row, strict=True) if cell.plain]


def fits(names: Sequence[str], rows: Iterable[Sequence[Cell]], width: int) -> bool:
    grid = [[_text(cell) for cell in row] for row in (names, *rows)]
    return _widest(_aligned(grid, [False] * len(names))) <= width


def pairs(rows: Iterable[tuple[str, Cell]], width: int) -> Text:
    """A name and what it is, a line each or a few."""
    known = list(rows)
    beside = max((cell_len(name) for name, _ in known), default=0) + GAP
    lines: list[Text] = []
    for name, cell in known:
        lines_beside = _wrapped(_text(cell), max(1, width - beside))
        if width - beside >= max(VALUE_LEAST, _widest(lines_beside)):
            lines.append(Text.assemble((name.ljust(beside), "dim"), *lines_beside[:1]))
            lines += [Text.assemble(" " * beside, line) for line in lines_beside[1:]]
        else:
            lines += [Text(name, "dim")] if name else []
            lines += [_indented(line) for line in _wrapped(_text(cell), max(1, width - INDENT))]
    return _together(lines)


def paragraph(text: Text, width: int) -> Text:
    return _together(_wrapped(text, width))


def _text(cell: Cell) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)


def _together(lines: Iterable[Text]) -> Text:
    found = Text("\n").join(lines)
    found.no_wrap, found.overflow = True, "ignore"
    return found


def _indented(line: Text) -> Text:
    return Text.assemble(" " * INDENT, line)


def _widest(lines: Sequence[Text]) -> int:
    return max((line.cell_len for line in lines), default=0)


def _aligned(grid: Sequence[Sequence[Text]], right: Sequence[bool]) -> list[Text]:
    widths = [max(cell.cell_len for cell in column) for column in zip(*grid, strict=True)]
    lines = []
    for row in grid:
        line = Text()
        for cell, width, to_the_right in zip(row, widths, right, strict=True):
            space = " " * (width - cell.cell_len)
            line.append_text(Text.assemble(space, cell) if to_the_right else Text.assemble(cell, space))
            line.append(" " * GAP)
        line.rstrip()
        lines.append(line)
    return lines


def _wrapped(text: Text, width: int) -> list[Text]:
    """Lines that end between words; a word that is too long alone may end after a comma."""
    ends, used = [], 0
    for found in re.finditer(r"\S+\s*", text.plain):
        words = [found[0]] if cell_len(found[0].rstrip()) <= width else ITEMS.findall(found[0])
        at = found.start()
        for word in words:
            if used and used + cell_len(word.rstrip()) > width:
                ends.append(at)
                used = 0
            used += cell_len(word)
            at += len(word)
    lines = list(text.divide(ends))
    for line in lines:
        line.rstrip()
    return lines
