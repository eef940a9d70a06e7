"""What earlier runs have proved, in a directory of small files: one a sealed segment.

An entry says: these copies held this segment with the same bytes (the digests of its blocks), its frames were walked
and good, and it led from one chain value to another. A later run takes a copy's segment as proved, without reading
it, if its header still says the same start and chain value and its file has the same size and time of change. Rot
changes neither: `--full` reads everything, and every node's scrubber does so anyway.

Nothing here is trusted beyond that: an entry that cannot be read is as good as none.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

import msgspec

from chronik_repl.errors import ConfigError
from chronik_repl.spark.digest import Block
from chronik_repl.spark.layout import Walked
from chronik_repl.spark.plan import Part, Span

FORMAT = 1


class ProvedCopy(msgspec.Struct, frozen=True):
    path: str
    size: int
    modified_ns: int


class Proved(msgspec.Struct):
    format: int
    start: int
    end: int
    chain: int
    blocks: list[Block]
    run: Walked
    copies: dict[str, ProvedCopy]
    when: str

    def covers(self, part: Part) -> bool:
        """Was exactly this file seen?"""
        file, seen = part.file, self.copies.get(part.copy)
        return (
            file is not None
            and seen is not None
            and (seen.path, seen.size, seen.modified_ns) == (file.path, file.size, file.modified_ns)
            and file.chain == self.chain
            and not file.wrong
            and part.upto == self.end
        )


class State:
    """The directory. Made when the first entry is written."""

    def __init__(self, folder: str, cluster_id: str) -> None:
        self._folder = Path(folder) / (quote(cluster_id, safe="") or "cluster")
        self._decoder = msgspec.json.Decoder(Proved)

    def find(self, span: Span) -> Proved | None:
        for chain in {p.file.chain for p in span.parts if p.file is not None and p.file.chain is not None}:
            try:
                entry = self._decoder.decode(self._path(span.start, chain).read_bytes())
            except (FileNotFoundError, msgspec.DecodeError):
                continue
            if entry.format == FORMAT and (entry.start, entry.end, entry.chain) == (span.start, span.end, chain):
                return entry
        return None

    def keep(self, span: Span, blocks: list[Block], run: Walked, copies: Iterable[str], when: str) -> None:
        seen = {
            p.copy: ProvedCopy(p.file.path, p.file.size, p.file.modified_ns)
            for p in span.parts
            if p.copy in copies and p.file is not None
        }
        before = self.find(span)
        if before is not None and before.blocks == blocks:
            seen = {**before.copies, **seen}
        entry = Proved(FORMAT, span.start, span.end, run.first_previous, blocks, run, seen, when)
        path = self._path(span.start, run.first_previous)
        aside = path.with_suffix(f".{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(msgspec.json.encode(entry))
            aside.replace(path)
        except OSError as error:
            raise ConfigError(
                f"--state {self._folder.parent}: {error.strerror}. Name a directory that can be written"
            ) from error

    def forget_below(self, position: int) -> None:
        """Retention has removed these segments everywhere."""
        if self._folder.is_dir():
            for path in self._folder.glob("*.json"):
                if path.name[:20].isdigit() and int(path.name[:20]) < position:
                    path.unlink(missing_ok=True)

    def _path(self, start: int, chain: int) -> Path:
        return self._folder / f"{start:020d}-{chain:08x}.json"
