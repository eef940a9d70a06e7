"""A Produce request with one batch for one partition, in the flexible versions: what most are, read in one pass.

hot.py makes an object of every part of a request; here are only the numbers that count, and None for a request that is
anything else or not sound: that one is then read with care, and refused where it must be. The answer repeats the
request's own bytes where the two are the same. tests/kafka/test_hot.py holds both against hot.py.
"""

from __future__ import annotations

import struct

from chronik_repl.errors import ProtocolError
from chronik_repl.kafka.codec import uvarint

LOWEST, HIGHEST = 9, 12
ONE = 2  # an array of one element: lengths of flexible versions are one more
NAME_SIZE_MAX = 0x7F  # as it stands there, in one byte
_HEAD = struct.Struct(">hhih")  # API key, version, correlation id, length of the client's id
_BODY = struct.Struct(">BBhiBB")  # tags, transactional id, acks, timeout, topics, length of the topic's name
_PARTITION = struct.Struct(">Bi")  # partitions, index
_ANSWER_HEAD = struct.Struct(">iiB")  # length, correlation id, tags
_ANSWER = struct.Struct(">ihqqq")  # index, code, base offset, log append time, log start offset
_TAIL = b"\x01" + bytes(8)  # no record errors, no message, no tags; no tags; throttle time; no tags
_ANSWER_SIZE = _ANSWER_HEAD.size - 4 + _ANSWER.size + len(_TAIL)

# version, correlation id, acks, timeout in ms, what the answer repeats, topic, partition, records
OneBatch = tuple[int, int, int, int, bytes, bytes, int, memoryview]


def read(view: memoryview) -> OneBatch | None:
    """A request, without its length."""
    try:
        _, version, correlation_id, size = _HEAD.unpack_from(view)
        at = 10 + size if size > 0 else 10
        tags, transactional, acks, timeout_ms, topics, name_size = _BODY.unpack_from(view, at)
        if (
            tags
            or transactional
            or topics != ONE
            or not 2 <= name_size <= NAME_SIZE_MAX
            or not LOWEST <= version <= HIGHEST
        ):
            return None
        str(view[10:at], "utf-8")
        partitions_at = at + 9 + name_size
        partitions, index = _PARTITION.unpack_from(view, partitions_at)
        size, records_at = uvarint(view, partitions_at + 5)
        end = records_at + size - 1
        if partitions != ONE or size == 0 or end + 3 != len(view) or view[end] or view[end + 1] or view[end + 2]:
            return None
    except (struct.error, IndexError, UnicodeDecodeError, ProtocolError):
        return None
    echo = bytes(view[at + 8 : partitions_at + 1])
    return version, correlation_id, acks, timeout_ms, echo, echo[2:-1], index, view[records_at:end]


def answer(correlation_id: int, echo: bytes, index: int, base_offset: int, log_start_offset: int) -> bytes:
    """That all went well."""
    return b"".join(
        (
            _ANSWER_HEAD.pack(_ANSWER_SIZE + len(echo), correlation_id, 0),
            echo,
            _ANSWER.pack(index, 0, base_offset, -1, log_start_offset),
            _TAIL,
        )
    )
