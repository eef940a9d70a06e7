"""Numbers as people read them."""

from __future__ import annotations


def count_of(number: int, what: str, several: str = "") -> str:
    """1 topic, 2 topics. `several`: where that is not by an s alone."""
    return f"{number:,} {what if number == 1 else several or what + 's'}"


def size_of(count: float) -> str:
    """1536 → 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"
