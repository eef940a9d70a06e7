"""Planted bugs."""
from __future__ import annotations
from typing import Any, NamedTuple
class Bug(NamedTuple):
    what: str
    failures: tuple[int, ...]
    patches: tuple[tuple[Any, str, Any], ...]
BUGS: dict[str, Bug] = {}
CAUGHT: dict[str, int] = {}
