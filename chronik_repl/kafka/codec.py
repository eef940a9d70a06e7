"""Kafka's messages, by kafka-python's generated codecs. The only module that knows that library.

A request comes in as one view (without its length) and leaves as a checked object; a response object leaves as bytes
with its length before it. Fields have Kafka's names in snake case; nested structs are attributes of their message
(`MetadataResponse.MetadataResponseBroker`). Produce and Fetch, the two hot messages, are in hot.py.

What comes in is untrusted. The library's decoder is lenient where a server must not be, so this module adds: the end of
what was decoded is the end of the request (it takes short strings for whole ones), no field is None that Kafka says is
always there, a variable-length number has at most five bytes (the library would collect an endless one, in quadratic
time), and unknown tagged fields are skipped in place (it would copy the rest of the request for each). Whatever is
wrong becomes ProtocolError.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from kafka.protocol.admin import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DescribeClusterRequest,
    DescribeClusterResponse,
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    ListGroupsRequest,
    ListGroupsResponse,
)
from kafka.protocol.api_key import ApiKey
from kafka.protocol.consumer import (
    FetchRequest,
    FetchResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    LeaveGroupRequest,
    LeaveGroupResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    SyncGroupRequest,
    SyncGroupResponse,
)
from kafka.protocol.metadata import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    MetadataRequest,
    MetadataResponse,
)
from kafka.protocol.producer import (
    InitProducerIdRequest,
    InitProducerIdResponse,
    ProduceRequest,
    ProduceResponse,
)
from kafka.protocol.sasl import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)
from kafka.protocol.schemas.fields.codecs import EncodeBuffer, UnsignedVarInt32
from kafka.protocol.schemas.fields.struct import StructField

from chronik_repl.errors import ProtocolError

__all__ = [
    "REQUESTS",
    "RESPONSES",
    "ApiKey",
    "ApiVersionsRequest",
    "ApiVersionsResponse",
    "CreatePartitionsRequest",
    "CreatePartitionsResponse",
    "CreateTopicsRequest",
    "CreateTopicsResponse",
    "DeleteGroupsRequest",
    "DeleteGroupsResponse",
    "DeleteTopicsRequest",
    "DeleteTopicsResponse",
    "DescribeClusterRequest",
    "DescribeClusterResponse",
    "DescribeConfigsRequest",
    "DescribeConfigsResponse",
    "DescribeGroupsRequest",
    "DescribeGroupsResponse",
    "FetchRequest",
    "FetchResponse",
    "FindCoordinatorRequest",
    "FindCoordinatorResponse",
    "Head",
    "HeartbeatRequest",
    "HeartbeatResponse",
    "InitProducerIdRequest",
    "InitProducerIdResponse",
    "JoinGroupRequest",
    "JoinGroupResponse",
    "LeaveGroupRequest",
    "LeaveGroupResponse",
    "ListGroupsRequest",
    "ListGroupsResponse",
    "ListOffsetsRequest",
    "ListOffsetsResponse",
    "MetadataRequest",
    "MetadataResponse",
    "OffsetCommitRequest",
    "OffsetCommitResponse",
    "OffsetDeleteRequest",
    "OffsetDeleteResponse",
    "OffsetFetchRequest",
    "OffsetFetchResponse",
    "OffsetForLeaderEpochRequest",
    "OffsetForLeaderEpochResponse",
    "ProduceRequest",
    "ProduceResponse",
    "SaslAuthenticateRequest",
    "SaslAuthenticateResponse",
    "SaslHandshakeRequest",
    "SaslHandshakeResponse",
    "SyncGroupRequest",
    "SyncGroupResponse",
    "decode_head",
    "decode_request",
    "encode_response",
    "skip_tags",
    "uvarint",
]

REQUESTS: dict[int, Any] = {
    message.API_KEY: message
    for message in (
        ProduceRequest,
        FetchRequest,
        ListOffsetsRequest,
        MetadataRequest,
        OffsetCommitRequest,
        OffsetFetchRequest,
        FindCoordinatorRequest,
        JoinGroupRequest,
        HeartbeatRequest,
        LeaveGroupRequest,
        SyncGroupRequest,
        DescribeGroupsRequest,
        ListGroupsRequest,
        SaslHandshakeRequest,
        ApiVersionsRequest,
        CreateTopicsRequest,
        DeleteTopicsRequest,
        InitProducerIdRequest,
        OffsetForLeaderEpochRequest,
        DescribeConfigsRequest,
        SaslAuthenticateRequest,
        CreatePartitionsRequest,
        DeleteGroupsRequest,
        OffsetDeleteRequest,
        DescribeClusterRequest,
    )
}
RESPONSES: dict[int, Any] = {
    message.API_KEY: message
    for message in (
        ProduceResponse,
        FetchResponse,
        ListOffsetsResponse,
        MetadataResponse,
        OffsetCommitResponse,
        OffsetFetchResponse,
        FindCoordinatorResponse,
        JoinGroupResponse,
        HeartbeatResponse,
        LeaveGroupResponse,
        SyncGroupResponse,
        DescribeGroupsResponse,
        ListGroupsResponse,
        SaslHandshakeResponse,
        ApiVersionsResponse,
        CreateTopicsResponse,
        DeleteTopicsResponse,
        InitProducerIdResponse,
        OffsetForLeaderEpochResponse,
        DescribeConfigsResponse,
        SaslAuthenticateResponse,
        CreatePartitionsResponse,
        DeleteGroupsResponse,
        OffsetDeleteResponse,
        DescribeClusterResponse,
    )
}

NEVER = 1 << 15
FLEXIBLE_FROM: dict[int, int] = {
    key: next((v for v in range(message.max_version + 1) if message.flexible_version_q(v)), NEVER)
    for key, message in REQUESTS.items()
}
_HEAD = struct.Struct(">hhi")
_I16 = struct.Struct(">h")
_I32 = struct.Struct(">i")
API_VERSIONS = 18


class Head(NamedTuple):
    """A request's header. `body_at` is where its body starts; the body is decoded in `version`."""

    key: int
    version: int
    correlation_id: int
    client_id: str
    body_at: int


def uvarint(view: memoryview, at: int) -> tuple[int, int]:
    """An unsigned number of variable length and where the next field starts. At most 32 bits."""
    byte = view[at]
    at += 1
    if byte < 0x80:
        return byte, at
    value = byte & 0x7F
    shift = 7
    while True:
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift > 28:
            raise ProtocolError("a variable-length number of more than five bytes")
    if value > 0xFFFFFFFF:
        raise ProtocolError("a variable-length number of more than 32 bits")
    return value, at


def skip_tags(view: memoryview, at: int) -> int:
    """Past the tagged fields at `at`, none of which is known."""
    if view[at] == 0:
        return at + 1
    count, at = uvarint(view, at)
    for _ in range(count):
        _, at = uvarint(view, at)
        size, at = uvarint(view, at)
        at += size
        if at > len(view):
            raise ProtocolError("a tagged field ends behind its request")
    return at


def _emit_bounded_uvarint(cls: type, ctx: Any, var_name: str, indent: str) -> None:
    ctx.globs["_uvarint"] = uvarint
    ctx.emit(indent, f"{var_name}, pos = _uvarint(data, pos)")


_emit_tagged_decode = StructField._emit_tagged_decode


def _emit_skipped_tags(self: Any, ctx: Any, var_name: str, indent: str, version: int) -> None:
    if self.tagged_fields(version)._fields:
        _emit_tagged_decode(self, ctx, var_name, indent, version)
        return
    ctx.globs["_skip_tags"] = skip_tags
    ctx.emit(indent, "pos = _skip_tags(data, pos)")


# The decoders are generated on first use, so this reaches all of them.
UnsignedVarInt32.emit_decode_from = classmethod(_emit_bounded_uvarint)
StructField._emit_tagged_decode = _emit_skipped_tags


def decode_head(view: memoryview) -> Head:
    """The header of a request of any API, known or not. Raises ProtocolError."""
    try:
        key, version, correlation_id = _HEAD.unpack_from(view, 0)
        (size,) = _I16.unpack_from(view, 8)
        at = 10
        client_id = ""
        if size >= 0:
            at += size
            if at > len(view):
                raise ProtocolError("a client id ends behind its request")
            client_id = str(view[10:at], "utf-8")
        if version >= FLEXIBLE_FROM.get(key, NEVER):
            at = skip_tags(view, at)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ProtocolError(f"unreadable request header: {error}") from error
    return Head(key, version, correlation_id, client_id, at)


def decode_request(key: int, version: int, view: memoryview, at: int) -> Any:
    """The body of a request whose API and version are in the table. Raises ProtocolError."""
    message = REQUESTS[key]
    flexible = message.flexible_version_q(version)
    decode = message._struct.compiled_decode_from(version, compact=flexible, tagged=flexible, data_class=message)
    try:
        request, end = decode(view, at)
    except (struct.error, IndexError, ValueError, OverflowError, AssertionError) as error:
        raise ProtocolError(f"unreadable {message.name} v{version}: {error}") from error
    if end != len(view):
        raise ProtocolError(f"{message.name} v{version} of {len(view)} bytes ends at {end}")
    _check_nulls(message._struct, request, version, message.name)
    return request


def _check_nulls(schema: Any, item: Any, version: int, name: str) -> None:
    for field in schema.untagged_fields(version):
        value = getattr(item, field.name)
        if value is None:
            if field.nullable_for_version_q(version) or field._type_str == "uuid":
                continue
            raise ProtocolError(f"{name} v{version}: {field.name} is null")
        if field.is_struct_array():
            for element in value:
                _check_nulls(field.array_of, element, version, name)
        elif field.is_array():
            if None in value:
                raise ProtocolError(f"{name} v{version}: {field.name} holds a null")
        elif field.is_struct():
            _check_nulls(field, value, version, name)


def encode_response(key: int, version: int, correlation_id: int, response: Any) -> bytearray:
    """The whole answer, its length first."""
    message = RESPONSES[key]
    flexible = message.flexible_version_q(version)
    out = EncodeBuffer(1024)
    _I32.pack_into(out.buf, 4, correlation_id)
    out.pos = 8
    if flexible and key != API_VERSIONS:  # clients read that one before they know our versions
        out.buf[8] = 0
        out.pos = 9
    message._struct.compiled_encode_into(version, compact=flexible, tagged=flexible)(response, out)
    _I32.pack_into(out.buf, 0, out.pos - 4)
    del out.buf[out.pos :]
    encoded: bytearray = out.buf
    return encoded
