"""The commands about a running cluster: status, topics, groups, members, promote, backup, certs.

Those that only look ask over HTTP where an address is given, and otherwise the node on this machine through
control.sock. Those that act go through control.sock alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, Literal

from chronik_repl.errors import ConfigError, Refused
from chronik_repl.values import Seconds

NODE_ID = re.compile("[0-9]{1,10}")
WEB_ADDRESS = re.compile(r"https?://[^\s/]+/?")
NODES_HTTP = (
    "Give the address of CHRONIK_HTTP_BIND_ADDR with --http (https://… where it has a certificate), or the node's "
    "directory with --data-dir."
)
KEYS = {"status": {"ready", "log", "role"}, "topics": {"topics"}, "groups": {"groups"}}  # of what a node answers
HTTP_DEFAULT = "127.0.0.1:9644"
HTTP_TIMEOUT_S = 10.0
WAIT_STEP_S = 0.1


def register(subcommands: Any) -> None:
    status = _command(
        subcommands,
        "status",
        _status,
        "the cluster as a table",
        """examples:
  chronik status                       the node of CHRONIK_DATA_DIR, or on 127.0.0.1:9644
  chronik status --watch               until Ctrl-C, every second
  chronik status --wait 30             in a script: go on once it is ready
  chronik status --http leader:9644 --json | jq .log.high_watermark

exit code: 0 ready, 1 not ready, 2 not reachable""",
    )
    _where(status)
    status.add_argument("--watch", action="store_true", help="go on showing it, every second")
    status.add_argument(
        "--wait", type=_seconds, default=0, metavar="SECONDS", help="wait until it is ready, at most so long"
    )
    status.add_argument("--json", action="store_true", help="print what /status says")

    topics = _command(
        subcommands,
        "topics",
        _topics,
        "topics, partitions and their offsets",
        "examples:\n  chronik topics\n  chronik topics orders\n  chronik topics --json | jq '.topics[].topic'",
    )
    _where(topics)
    topics.add_argument("topic", nargs="*", help="only these")
    topics.add_argument("--json", action="store_true", help="print what /topics says")

    groups = _command(
        subcommands,
        "groups",
        _groups,
        "consumer groups, where they are and how far behind",
        "examples:\n  chronik groups\n  chronik groups billing --json",
    )
    _where(groups)
    groups.add_argument("group", nargs="*", help="only these")
    groups.add_argument("--json", action="store_true", help="print what /groups says")

    members = _command(
        subcommands,
        "members",
        _members,
        "list, add or remove members",
        """examples:
  chronik members --data-dir /var/lib/chronik       who counts
  export CHRONIK_DATA_DIR=/var/lib/chronik          now without --data-dir
  chronik members add node4:9291                    ask a follower in (on the leader)
  chronik members remove 3                          node 3 counts no more, and is shipped nothing (on the leader)
  chronik members remove node4:9291                 the same, by its replication address""",
    )
    members.add_argument(
        "action", nargs="?", choices=("list", "add", "remove"), default="list", help="what to do (list)"
    )
    members.add_argument("which", nargs="?", help="add: its replication host:port; remove: that, or its node id")
    _data_dir(members)
    members.add_argument("--json", action="store_true", help="the members as one object")

    promote = _command(
        subcommands,
        "promote",
        _promote,
        "make the node on this machine the leader",
        """examples:
  chronik promote --data-dir /var/lib/chronik
  chronik promote --data-dir /var/lib/chronik --accept-loss          when the others are gone for good

While the old leader lives it is drained first, and nothing is lost. Where too few members answer it refuses and says
what is missing. --accept-loss is your own decision, is written into the log, and removes the members that did not
answer: what only they held is lost.""",
    )
    _data_dir(promote)
    promote.add_argument("--accept-loss", action="store_true", help="lead even if acked records may be lost")
    promote.add_argument("--json", action="store_true", help="the new epoch as one object")

    backup = _command(
        subcommands,
        "backup",
        _backup,
        "copy a node's directory while it runs",
        """examples:
  chronik backup /var/lib/chronik /backup/chronik-monday
  CHRONIK_NODE_ID=9 CHRONIK_DATA_DIR=/backup/chronik-monday chronik-follower

The copy has an identity of its own and starts as a node; `chronik members add HOST:PORT` on the leader makes it a
member.""",
    )
    backup.add_argument("source", type=Path, metavar="SRC", help="a node's data directory")
    backup.add_argument("target", type=Path, metavar="DST", help="a directory that is not there yet, or empty")
    backup.add_argument("--json", action="store_true", help="what was copied as one object")

    certs = _command(
        subcommands,
        "certs",
        _certs,
        "make a CA and certificates for links between nodes",
        """examples:
  chronik certs /etc/chronik/certs 1 2 3
  chronik certs /etc/chronik/certs 4 --host node4.example --host 10.0.0.4     one more, later, from the same CA

Give each node its own node-N.pem and node-N.key and everyone ca.pem. ca.key stays with you.""",
    )
    certs.add_argument("folder", type=Path, metavar="DIR", help="where they go; a CA that is there is used")
    certs.add_argument("nodes", nargs="+", type=_node_id, metavar="NODE_ID", help="the nodes' CHRONIK_NODE_IDs")
    certs.add_argument("--host", action="append", default=[], help="a name or address in the certificates; may repeat")
    certs.add_argument("--days", type=int, default=825, help="how long they are good (825)")


def _command(subcommands: Any, name: str, run: Any, about: str, epilog: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subcommands.add_parser(
        name,
        help=about,
        description=about[0].upper() + about[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def _data_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-dir", metavar="DIR", help="the node's data directory (CHRONIK_DATA_DIR)")


def _where(parser: argparse.ArgumentParser) -> None:
    _data_dir(parser)
    parser.add_argument("--http", metavar="HOST:PORT", help=f"ask this node over HTTP, or https://… ({HTTP_DEFAULT})")
    parser.add_argument("--ca", metavar="FILE", help="with https: trust certificates of this CA (PEM)")


def _node_id(text: str) -> int:
    if not NODE_ID.fullmatch(text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: a node's number is expected, from 1 on")
    return int(text)


def _seconds(text: str) -> float:
    try:
        return Seconds("", most=86400).read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: allowed is {error}") from None


# ---- asking


def _directory(arguments: argparse.Namespace) -> Path:
    found = arguments.data_dir or os.environ.get("CHRONIK_DATA_DIR")
    if not found:
        raise ConfigError("which node? Give its directory with --data-dir, or set CHRONIK_DATA_DIR.")
    return Path(found)


def _ask(arguments: argparse.Namespace, what: str) -> dict[str, Any]:
    """`what` is status, topics or groups."""
    if arguments.http is None and (arguments.data_dir or os.environ.get("CHRONIK_DATA_DIR")):
        from chronik_repl import control

        answer = control.call(_directory(arguments), {"command": what}, timeout_s=HTTP_TIMEOUT_S)
        found: dict[str, Any] = answer["status"] if what == "status" else answer
        return found
    return _get(arguments.http or os.environ.get("CHRONIK_HTTP_BIND_ADDR") or HTTP_DEFAULT, what, arguments.ca)


def _get(address: str, what: str, ca: str | None) -> dict[str, Any]:
    import http.client
    import ssl
    import urllib.error
    import urllib.request

    base = address if "://" in address else f"http://{address}"
    url = f"{base.rstrip('/')}/{what}"
    if not WEB_ADDRESS.fullmatch(base):
        raise ConfigError(f"--http {address}: host:port is expected, or http://host:port, or https://host:port")
    if ca is not None and not url.startswith("https:"):
        raise ConfigError(f"--ca goes with https: give --http https://{address.rpartition('://')[2]}")
    try:
        trust = ssl.create_default_context(cafile=ca) if url.startswith("https:") else None
    except OSError as error:
        raise ConfigError(
            f"--ca {ca}: {error.strerror}. Give a file with certificates in PEM, such as ca.pem"
        ) from error
    try:
        with urllib.request.urlopen(url, timeout=HTTP_TIMEOUT_S, context=trust) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        raise Refused(f"{url} answers {error.code}: that is no node's HTTP address. {NODES_HTTP}") from error
    except (http.client.HTTPException, ConnectionResetError, ValueError) as error:
        raise Refused(f"what listens at {url} does not speak HTTP as a node does. {NODES_HTTP}") from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise Refused(
                f"{url}: its certificate is not trusted ({reason.verify_message}). Give its CA with --ca FILE"
            ) from error
        if isinstance(reason, ssl.SSLError):
            raise Refused(f"{url} does not speak TLS. Without it: --http {address.rpartition('://')[2]}") from error
        why = getattr(reason, "strerror", None) or reason
        raise Refused(
            f"{url} does not answer ({why}). Is the node running? Give its HTTP address with --http, or its directory "
            "with --data-dir."
        ) from error
    if not isinstance(found, dict) or not KEYS[what] <= found.keys():
        raise Refused(f"{url} is answered, but not by a node. {NODES_HTTP}")
    return found


# ---- the commands


def _status(arguments: argparse.Namespace) -> int:
    if arguments.watch:
        from chronik_repl.status_view import watch

        return watch(lambda: _ask(arguments, "status"), as_json=arguments.json)
    status = _ask_until_ready(arguments)
    if arguments.json:
        print(json.dumps(status, indent=2))
    else:
        from chronik_repl.status_view import show_status

        show_status(status)
    return 0 if status["ready"] else 1


def _ask_until_ready(arguments: argparse.Namespace) -> dict[str, Any]:
    deadline = time.monotonic() + arguments.wait
    while True:
        try:
            status = _ask(arguments, "status")
            if status["ready"] or time.monotonic() > deadline:
                return status
        except Refused:
            if time.monotonic() > deadline:
                raise
        time.sleep(WAIT_STEP_S)


def _topics(arguments: argparse.Namespace) -> int:
    return _listed(arguments, "topic", arguments.topic)


def _groups(arguments: argparse.Namespace) -> int:
    return _listed(arguments, "group", arguments.group)


def _listed(arguments: argparse.Namespace, what: Literal["topic", "group"], wanted: list[str]) -> int:
    """All of them, or those that are wanted."""
    found = _ask(arguments, f"{what}s")[f"{what}s"]
    missing = sorted(set(wanted) - {row[what] for row in found})
    if missing:
        raise Refused(f"there is no {what} {', '.join(missing)}; `chronik {what}s` shows all of them.")
    found = [row for row in found if not wanted or row[what] in wanted]
    if arguments.json:
        print(json.dumps({f"{what}s": found}, indent=2))
    else:
        from chronik_repl.status_view import show_groups, show_topics

        (show_topics if what == "topic" else show_groups)(found)
    return 0


def _members(arguments: argparse.Namespace) -> int:
    from chronik_repl import control

    command: dict[str, Any] = {"command": "members"}
    if arguments.action == "add":
        if not arguments.which:
            raise ConfigError("whom? As in: chronik members add node4:9291")
        command = {"command": "members-add", "address": arguments.which}
    elif arguments.action == "remove":
        if not arguments.which:
            raise ConfigError("whom? Give a node id or its address, as in: chronik members remove 3")
        which = (
            {"node_id": int(arguments.which)} if NODE_ID.fullmatch(arguments.which) else {"address": arguments.which}
        )
        command = {"command": "members-remove", **which}
    elif arguments.which:
        raise ConfigError(f"`members list` lists all of them: leave {arguments.which} out")
    timeout_s = HTTP_TIMEOUT_S if command == {"command": "members"} else control.TIMEOUT_S
    return _answered(arguments, control.call(_directory(arguments), command, timeout_s=timeout_s))


def _promote(arguments: argparse.Namespace) -> int:
    from chronik_repl import control

    command = {"command": "promote", "accept_loss": arguments.accept_loss}
    return _answered(arguments, control.call(_directory(arguments), command, say=_progress(arguments)))


def _progress(arguments: argparse.Namespace) -> Any:
    return None if arguments.json else lambda text: print(f"… {text}", file=sys.stderr)


def _answered(arguments: argparse.Namespace, answer: dict[str, Any]) -> int:
    if arguments.json:
        print(json.dumps(answer, indent=2))
        return 0
    if "message" in answer:
        print(answer["message"])
    if "members" in answer:
        from chronik_repl.status_view import show_members

        show_members(answer["members"])
    return 0


def _backup(arguments: argparse.Namespace) -> int:
    from chronik_repl.backup import backup

    return backup(arguments.source, arguments.target, as_json=arguments.json)


def _certs(arguments: argparse.Namespace) -> int:
    from chronik_repl.certs import make

    for file in make(
        arguments.folder, [f"node-{node}" for node in arguments.nodes], hosts=arguments.host, days=arguments.days
    ):
        print(file)
    print("Each node gets its own node-N.pem and node-N.key, and ca.pem. Keep ca.key off the nodes.", file=sys.stderr)
    return 0
