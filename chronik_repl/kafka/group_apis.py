"""Consumer groups as Kafka's messages: who coordinates, joining and leaving, and looking at groups.

Each handler takes a message apart, asks the coordinator, and puts the answer together. The decisions are in groups.py.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from chronik_repl.kafka.codec import (
    DeleteGroupsResponse,
    DescribeGroupsResponse,
    FindCoordinatorResponse,
    HeartbeatResponse,
    JoinGroupResponse,
    LeaveGroupResponse,
    ListGroupsResponse,
    SyncGroupResponse,
)
from chronik_repl.kafka.codes import Code
from chronik_repl.kafka.context import Api, Context
from chronik_repl.kafka.group_messages import Join, Phase
from chronik_repl.kafka.metadata import brokers, leader_id

GROUP, TRANSACTION = 0, 1  # what a coordinator is asked for
ID_FIRST_SINCE = 4  # JoinGroup versions
SKIP_ASSIGNMENT_SINCE = 9
BATCHED_SINCE = 4  # FindCoordinator
MANY_MEMBERS_SINCE = 3  # LeaveGroup
NOT_FOUND_SINCE = 6  # DescribeGroups
CLIENT_ID_MAX = 64  # of it in a member id


async def find_coordinator(context: Context, version: int, request: Any) -> Any:
    """The leader coordinates every group. Transactions have no coordinator, and never will have one."""
    code, node_id, host, port, message = Code.NONE, -1, "", -1, None
    leader = leader_id(context.door)
    if request.key_type == TRANSACTION:
        code, message = Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "this server has no transactions"
    elif request.key_type != GROUP:
        code, message = Code.INVALID_REQUEST, f"there is no coordinator of type {request.key_type}"
    elif leader < 0:
        code, message = Code.COORDINATOR_NOT_AVAILABLE, "no leader is known here"
    else:
        node_id, host, port, _ = next(broker for broker in brokers(context.door) if broker[0] == leader)
    if version < BATCHED_SINCE:
        return FindCoordinatorResponse(error_code=code, error_message=message, node_id=node_id, host=host, port=port)
    return FindCoordinatorResponse(
        coordinators=[
            FindCoordinatorResponse.Coordinator(
                key=key, node_id=node_id, host=host, port=port, error_code=code, error_message=message
            )
            for key in dict.fromkeys(request.coordinator_keys)
        ]
    )


async def join_group(context: Context, version: int, request: Any) -> Any:
    instance_id = request.group_instance_id or ""
    client_id = context.client.client_id
    reply = await context.door.coordinator.join(
        request.group_id,
        Join(
            member_id=request.member_id,
            instance_id=instance_id,
            client_id=client_id,
            client_host="/" + context.client.host,
            session_timeout_ms=request.session_timeout_ms,
            rebalance_timeout_ms=request.rebalance_timeout_ms if version >= 1 else request.session_timeout_ms,
            protocol_type=request.protocol_type,
            protocols=tuple((protocol.name, bytes(protocol.metadata)) for protocol in request.protocols),
            new_member_id=f"{(instance_id or client_id)[:CLIENT_ID_MAX]}-{uuid4()}",
            id_first=version >= ID_FIRST_SINCE,
            can_skip=version >= SKIP_ASSIGNMENT_SINCE,
        ),
    )
    await context.room()
    nullable = version >= 7  # before, an absent name is an empty one
    return JoinGroupResponse(
        error_code=reply.code,
        generation_id=reply.generation,
        protocol_type=reply.protocol_type,
        protocol_name=reply.protocol if nullable else reply.protocol or "",
        leader=reply.leader,
        skip_assignment=reply.skip_assignment,
        member_id=reply.member_id,
        members=[
            JoinGroupResponse.JoinGroupResponseMember(
                member_id=member_id, group_instance_id=instance or None, metadata=metadata
            )
            for member_id, instance, metadata in reply.members
        ],
    )


async def sync_group(context: Context, version: int, request: Any) -> Any:
    reply = await context.door.coordinator.sync(
        request.group_id,
        request.member_id,
        request.group_instance_id or "",
        request.generation_id,
        request.protocol_type,
        request.protocol_name,
        {entry.member_id: bytes(entry.assignment) for entry in request.assignments},
    )
    return SyncGroupResponse(
        error_code=reply.code,
        protocol_type=reply.protocol_type,
        protocol_name=reply.protocol,
        assignment=reply.assignment,
    )


async def heartbeat(context: Context, version: int, request: Any) -> Any:
    code = context.door.coordinator.heartbeat(
        request.group_id, request.member_id, request.group_instance_id or "", request.generation_id
    )
    return HeartbeatResponse(error_code=code)


async def leave_group(context: Context, version: int, request: Any) -> Any:
    coordinator = context.door.coordinator
    if version < MANY_MEMBERS_SINCE:
        code, codes = await coordinator.leave(request.group_id, [(request.member_id, "")])
        return LeaveGroupResponse(error_code=code or codes[0])
    asked = [(member.member_id, member.group_instance_id or "") for member in request.members]
    code, codes = await coordinator.leave(request.group_id, asked)
    return LeaveGroupResponse(
        error_code=code,
        members=[
            LeaveGroupResponse.MemberResponse(
                member_id=member_id, group_instance_id=instance_id or None, error_code=member_code
            )
            for (member_id, instance_id), member_code in zip(asked, codes, strict=False)
        ],
    )


async def list_groups(context: Context, version: int, request: Any) -> Any:
    """All groups from the leader; none, and no error, from a follower: clients ask every node and add up."""
    coordinator = context.door.coordinator
    code = await coordinator.ready()
    if code is Code.NOT_COORDINATOR:
        return ListGroupsResponse(error_code=Code.NONE, groups=[])
    await context.room()
    groups = []
    states = {state.lower() for state in request.states_filter or ()}
    types = {kind.lower() for kind in request.types_filter or ()}
    if code is Code.NONE and (not types or "classic" in types):
        for name in coordinator.names():
            group = coordinator.find(name)
            if group is not None and (not states or group.phase.value.lower() in states):
                groups.append(
                    ListGroupsResponse.ListedGroup(
                        group_id=name,
                        protocol_type=group.protocol_type,
                        group_state=group.phase.value,
                        group_type="classic",
                    )
                )
    return ListGroupsResponse(error_code=code, groups=groups)


async def describe_groups(context: Context, version: int, request: Any) -> Any:
    codes = {name: await _standing(context, name) for name in dict.fromkeys(request.groups)}
    await context.room()
    return DescribeGroupsResponse(groups=[_describe(context, version, name, code) for name, code in codes.items()])


async def _standing(context: Context, name: str) -> Code:
    coordinator = context.door.coordinator
    code = await coordinator.ready() if name else Code.INVALID_GROUP_ID
    return await coordinator.committed(coordinator.last_change_end(name)) if code is Code.NONE else code


def _describe(context: Context, version: int, name: str, code: Code) -> Any:
    coordinator = context.door.coordinator
    described = DescribeGroupsResponse.DescribedGroup
    blank = {"group_id": name, "group_state": "", "protocol_type": "", "protocol_data": "", "members": []}
    if code is not Code.NONE:
        return described(error_code=code, **blank)
    group = coordinator.find(name)
    if group is None:
        blank["group_state"] = "Dead"
        if version >= NOT_FOUND_SINCE:
            return described(error_code=Code.GROUP_ID_NOT_FOUND, error_message=f"there is no group {name}", **blank)
        return described(error_code=Code.NONE, **blank)
    stable = group.phase is Phase.STABLE
    return described(
        error_code=Code.NONE,
        group_id=name,
        group_state=group.phase.value,
        protocol_type=group.protocol_type,
        protocol_data=group.protocol if stable else "",
        members=[
            described.DescribedGroupMember(
                member_id=member.member_id,
                group_instance_id=member.instance_id or None,
                client_id=member.client_id,
                client_host=member.client_host,
                member_metadata=member.metadata(group.protocol) if stable else b"",
                member_assignment=member.assignment if stable else b"",
            )
            for member in group.members.values()
        ],
    )


async def delete_groups(context: Context, version: int, request: Any) -> Any:
    return DeleteGroupsResponse(
        results=[
            DeleteGroupsResponse.DeletableGroupResult(
                group_id=name, error_code=await context.door.coordinator.remove(name)
            )
            for name in request.groups_names
        ]
    )


APIS = (
    Api(10, 0, 4, find_coordinator),
    Api(11, 0, 9, join_group),
    Api(12, 0, 4, heartbeat),
    Api(13, 0, 5, leave_group),
    Api(14, 0, 5, sync_group),
    Api(15, 0, 6, describe_groups),
    Api(16, 0, 5, list_groups),
    Api(42, 0, 2, delete_groups),
)
