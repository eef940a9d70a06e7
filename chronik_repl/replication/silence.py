"""Nobody leads, as far as a follower hears: what it says of that, and when it says so by itself.

A leader that is started again dials within moments, so the line in the log waits for the heartbeat's timeout. Who asks
(`/status`) is told at once.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from chronik_repl.replication.local import LiveLeader, Local
from chronik_repl.replication.receiver import Receiver


def nobody_leads(local: Local, heard: LiveLeader | None) -> str:
    """For the operator. `heard`: the leader of the last session."""
    history, here = local.log.state.history, local.replication_address
    led = [(entry.epoch, entry.leader) for entry in history[-1:]]
    if heard is not None:
        led.append((heard.epoch, heard.member.node_id))
    if not led:
        return (
            f"no leader has called yet: start one with {here} in its CHRONIK_REPLICATION_FOLLOWERS, or run "
            f"`chronik members add {here}` on the one that leads"
        )
    epoch, node_id = max(led)
    if node_id == local.me.node_id:
        return f"no leader is known; this node led last (epoch {epoch}) and lost a part of its log: promote another one"
    return f"no leader is known; node {node_id} led last (epoch {epoch}): start it, or promote one (chronik promote)"


async def tell_silence(local: Local, receiver: Receiver, missing: Callable[[], str]) -> None:
    """Until cancelled: one line a silence. `missing`: what to say now; "" while someone leads."""
    patience_s = local.settings.replication_heartbeat_timeout_secs
    said = ""
    while True:
        due_at = receiver.heard_at + patience_s
        if trio.current_time() < due_at:
            said = ""
            await trio.sleep_until(due_at)
            continue
        text = missing()
        if text not in ("", said):
            local.say("warning", text)
        said = text
        await trio.sleep(patience_s)
