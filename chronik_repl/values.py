"""Values as people write them into an environment: sizes, seconds, switches, addresses.

Each kind carries what its variable means and its limits. `read` takes what a person wrote and returns the value, or
raises ValueError that says what is allowed.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import msgspec

from chronik_repl.addresses import is_wildcard, split_address

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
UNITS = {
    "": 1,
    "B": 1,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": TIB,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


class Number(msgspec.Struct, frozen=True):
    meaning: str
    least: int = 0
    most: int = 2**31 - 1
    kind = "number"

    def read(self, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = self.least - 1
        if not self.least <= value <= self.most:
            raise ValueError(f"a whole number from {self.least} to {self.most}")
        return value


class Size(msgspec.Struct, frozen=True):
    meaning: str
    least: int = 0
    most: int = 1 << 60
    kind = "size"

    def read(self, text: str) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
        unit = UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None:
            raise ValueError("bytes, or a size such as 512KiB, 64MiB, 10GiB")
        value = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
        if not self.least <= value <= self.most:
            raise ValueError(f"a size from {show_size(self.least)} to {show_size(self.most)}")
        return value


class Decimal(msgspec.Struct, frozen=True):
    meaning: str
    least: float = 0.0
    most: float = 1e9
    kind = "decimal"

    def read(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not self.least <= value <= self.most:  # false for nan
            raise ValueError(f"a number from {show(self.least)} to {show(self.most)}, decimals allowed")
        return value


class Seconds(Decimal, frozen=True):
    kind = "seconds"

    def read(self, text: str) -> float:
        try:
            return Decimal.read(self, text)
        except ValueError:
            raise ValueError(f"seconds from {show(self.least)} to {show(self.most)}, decimals allowed") from None


class Switch(msgspec.Struct, frozen=True):
    meaning: str
    kind = "true or false"

    def read(self, text: str) -> bool:
        value = {
            "true": True,
            "1": True,
            "yes": True,
            "on": True,
            "false": False,
            "0": False,
            "no": False,
            "off": False,
        }
        if text.lower() not in value:
            raise ValueError("true or false")
        return value[text.lower()]


class Choice(msgspec.Struct, frozen=True):
    meaning: str
    among: tuple[str, ...]

    @property
    def kind(self) -> str:
        return " | ".join(self.among)

    def read(self, text: str) -> str:
        if text.lower() not in self.among:
            raise ValueError(f"one of {', '.join(self.among)}")
        return text.lower()


class Text(msgspec.Struct, frozen=True):
    meaning: str
    pattern: str = r"[ -~]{1,249}"
    allowed: str = "printable characters"
    kind = "text"

    def read(self, text: str) -> str:
        if not re.fullmatch(self.pattern, text):
            raise ValueError(self.allowed)
        return text


class Address(msgspec.Struct, frozen=True):
    meaning: str
    bind: bool = True  # port 0, "any free one", makes sense
    kind = "host:port"

    def read(self, text: str) -> str:
        try:
            host, port = split_address(text)
        except ValueError as error:
            raise ValueError(f"host:port, such as 127.0.0.1:9092, with a port up to 65535; {error}") from None
        if not self.bind and (port == 0 or is_wildcard(host)):
            raise ValueError("host:port as others reach it, so neither port 0 nor a wildcard")
        return text


class Addresses(msgspec.Struct, frozen=True):
    meaning: str
    kind = "host:port,…"

    def read(self, text: str) -> tuple[str, ...]:
        found = tuple(part.strip() for part in text.split(",") if part.strip())
        for address in found:
            Address("", bind=False).read(address)
        if len(set(found)) != len(found):
            raise ValueError("each address once")
        return found


class Directory(msgspec.Struct, frozen=True):
    meaning: str
    kind = "directory"

    def read(self, text: str) -> Path:
        return Path(text).expanduser()


class File(msgspec.Struct, frozen=True):
    meaning: str
    kind = "file"

    def read(self, text: str) -> Path:
        return Path(text).expanduser()


Kind = Number | Size | Decimal | Switch | Choice | Text | Address | Addresses | Directory | File


def show(value: Any) -> str:
    """A value as one would write it into an environment file."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def show_size(value: int) -> str:
    for unit, scale in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if value and value % scale == 0:
            return f"{value // scale}{unit}"
    return str(value)
