"""docs/protocol.md names every field of every message, in order: someone else writes a follower from it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from chronik_repl.replication import messages
from chronik_repl.wal.changes import Change

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


@pytest.mark.parametrize(("kind", "magic"), [(k, m.to_bytes(2, "big").decode()) for k, m in messages._MAGIC_OF.items()])
def test_page_names_every_field_in_order(kind: type[msgspec.Struct], magic: str) -> None:
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{magic}`"))
    told = [re.match(r"\w+", field.strip())[0] for field in re.sub(r"\(.*?\)", "", row.split("|")[3]).split(",")]  # type: ignore[index]
    assert told == [field.encode_name for field in msgspec.structs.fields(kind)]


def test_page_names_every_answer() -> None:
    text = PAGE[PAGE.index("`HA.status`") :]
    for answer in messages.Answer:
        assert re.search(rf"\b{answer.value} ", text), answer


@pytest.mark.parametrize("change", get_args(Change), ids=lambda change: change.__struct_config__.tag)
def test_page_names_every_field_of_a_change_in_order(change: type[msgspec.Struct]) -> None:
    row = next(line for line in PAGE.splitlines() if re.match(rf"\| \d \| `{change.__struct_config__.tag}` \|", line))
    told = [name for name in re.findall(r"`(\w+)`", row.split("|")[3]) if name in change.__struct_fields__]
    assert list(dict.fromkeys(told)) == [field.encode_name for field in msgspec.structs.fields(change)]
