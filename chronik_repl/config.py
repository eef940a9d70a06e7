"""Environment → one frozen `Settings`, once, at the front door.

`Settings` is the table: each field is a variable (`CHRONIK_` and its name in capitals), with its kind, default, limits
and meaning beside it. The reader below, `chronik config` and docs/configuration.md come from it. `load` says everything
that is wrong at once, each line with the variable, its value and what is allowed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec

from chronik_repl.addresses import is_loopback, is_wildcard, split_address
from chronik_repl.errors import ConfigError
from chronik_repl.values import (
    GIB,
    KIB,
    MIB,
    Address,
    Addresses,
    Choice,
    Decimal,
    Directory,
    File,
    Kind,
    Number,
    Seconds,
    Size,
    Switch,
    Text,
    show,
    show_size,
)

Program = Literal["leader", "follower"]

PREFIX = "CHRONIK_"

# What Kubernetes puts into every container for a service whose name starts with "chronik-".
INJECTED = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_.+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
INJECTED_URL = re.compile(r"(tcp|udp|sctp)://")  # the value of NAME_PORT, which alone could be a person's typing error


LEVELS = ("debug", "info", "warning", "error")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every variable, read and checked. Both programs take the same ones: a role is a state, not a build."""

    node_id: Annotated[int, Number("This node's number in the cluster; its own for ever.", least=1)]
    data_dir: Annotated[Path, Directory("Where the log and the node's identity live. Made if missing.")]
    cluster_id: Annotated[
        str,
        Text(
            "The cluster's name. Empty: what the log says; a new cluster makes one up.",
            r"[A-Za-z0-9._-]{1,64}",
            "1 to 64 of A-Z a-z 0-9 . _ -",
        ),
    ] = ""
    rack: Annotated[str, Text("Where this node stands; a consumer with the same `client.rack` reads here.")] = ""
    bootstrap: Annotated[bool, Switch("Found a new cluster although not every listed follower has answered.")] = False
    insecure: Annotated[bool, Switch("Allow addresses beyond loopback without TLS and passwords.")] = False

    replication_followers: Annotated[
        tuple[str, ...], Addresses("Whom a leader dials. A follower that answers becomes a member.")
    ] = ()
    replication_mode: Annotated[
        Literal["async", "sync"],
        Choice(
            "What acks=all waits for: the leader's disk, or followers' too. Unset: what the log says.",
            ("async", "sync"),
        ),
    ] = "async"
    replication_sync_replicas: Annotated[
        int,
        Number("In sync mode, how many followers must have it durable. Unset: what the log says.", least=1, most=99),
    ] = 1
    replication_max_queue_size: Annotated[
        int, Number("Frames that each follower's ring holds; beyond that it reads from disk.", least=16, most=10**8)
    ] = 100_000
    replication_max_queue_bytes: Annotated[int, Size("Bytes that each follower's ring holds.", least=64 * KIB)] = (
        64 * MIB
    )
    replication_heartbeat_interval_secs: Annotated[
        float, Seconds("A sign of life this often, busy or idle.", least=0.05, most=3600)
    ] = 10.0
    replication_heartbeat_timeout_secs: Annotated[
        float, Seconds("No sign of life for this long ends a session.", least=0.1, most=86400)
    ] = 30.0
    replication_reconnect_delay_secs: Annotated[
        float,
        Seconds(
            "The longest wait before dialling again; the first is none, then 0.1 s, doubling.", least=0.1, most=3600
        ),
    ] = 30.0
    replication_tls_cert: Annotated[Path | None, File("This node's certificate for links between nodes (PEM).")] = None
    replication_tls_key: Annotated[Path | None, File("Its key (PEM).")] = None
    replication_tls_ca: Annotated[Path | None, File("The cluster's CA: nobody else is listened to (PEM).")] = None

    wal_receiver_enabled: Annotated[
        bool, Switch("Listen for a leader. Also lets a deposed leader go on as a follower.")
    ] = False
    wal_receiver_bind_addr: Annotated[str, Address("Where leaders reach this node.")] = "127.0.0.1:9291"
    wal_segment_bytes: Annotated[int, Size("A segment's size.", least=4 * KIB, most=GIB)] = 64 * MIB
    wal_retention_bytes: Annotated[int, Size("Remove the oldest segments beyond this. 0: no limit.")] = 0
    wal_retention_hours: Annotated[float, Decimal("Remove segments older than this. 0: no limit.")] = 168.0
    wal_keep_bytes: Annotated[int, Size("How much a slow follower may hold back from retention.")] = 10 * GIB
    wal_linger_secs: Annotated[float, Seconds("Wait this long for company before a sync. 0: never.", most=1)] = 0.0
    max_frame_bytes: Annotated[
        int, Size("The largest frame, and so the largest record batch.", least=KIB, most=GIB)
    ] = 16 * MIB
    min_free_bytes: Annotated[int, Size("Below this much free disk space appends are refused.")] = GIB
    scrub_mb_per_sec: Annotated[
        float, Decimal("How fast sealed segments are checked in the background. 0: not at all.")
    ] = 8.0

    kafka_bind_addr: Annotated[str, Address("Where Kafka clients connect.")] = "127.0.0.1:9092"
    kafka_advertised_addr: Annotated[str, Address("What clients are told. Empty: the bound address.", bind=False)] = ""
    kafka_max_connections: Annotated[int, Number("Client connections at once; more are closed.", least=1)] = 2000
    kafka_max_inflight_bytes: Annotated[
        int, Size("Requests and answers held in memory; beyond that clients wait.", least=MIB)
    ] = 256 * MIB
    kafka_tls_cert: Annotated[Path | None, File("The certificate that Kafka clients see (PEM).")] = None
    kafka_tls_key: Annotated[Path | None, File("Its key (PEM).")] = None
    kafka_tls_ca: Annotated[Path | None, File("If set, clients must show a certificate of this CA (PEM).")] = None
    kafka_users_file: Annotated[
        Path | None, File("Users with salted keys, made by `chronik users add`. If set, clients must log in.")
    ] = None
    auto_create_topics: Annotated[bool, Switch("Make a topic when it is first used.")] = True
    default_partitions: Annotated[int, Number("Partitions of a topic made that way.", least=1, most=10_000)] = 1

    http_bind_addr: Annotated[str, Address("Where the page, /status, /metrics, /healthz and /readyz are served.")] = (
        "127.0.0.1:9644"
    )
    http_tls_cert: Annotated[Path | None, File("The page's certificate (PEM).")] = None
    http_tls_key: Annotated[Path | None, File("Its key (PEM).")] = None

    log_level: Annotated[str, Choice("The least that is logged.", LEVELS)] = "info"
    log_format: Annotated[
        Literal["console", "json"], Choice("For people, or an object a line.", ("console", "json"))
    ] = "console"

    given: frozenset[str] = frozenset()  # the fields that were set; the log decides some that were not

    def is_set(self, field: str) -> bool:
        assert field in self.__struct_fields__, field
        return field in self.given


class Variable(msgspec.Struct, frozen=True):
    """A row of the table."""

    field: str
    rule: Kind
    default: Any  # msgspec.NODEFAULT where it must be set

    @property
    def name(self) -> str:
        return PREFIX + self.field.upper()

    @property
    def required(self) -> bool:
        return self.default is msgspec.NODEFAULT

    def default_for(self, program: Program) -> Any:
        return program == "follower" if self.field == "wal_receiver_enabled" else self.default

    def show(self, value: Any) -> str:
        return show_size(value) if isinstance(self.rule, Size) else show(value)


def _table() -> tuple[Variable, ...]:
    hints = get_type_hints(Settings, include_extras=True)
    return tuple(
        Variable(field.name, get_args(hints[field.name])[1], field.default)
        for field in msgspec.structs.fields(Settings)
        if field.name != "given"
    )


VARIABLES = _table()


# ---- reading


def load(environ: Mapping[str, str], program: Program, *, check_files: bool = True) -> Settings:
    """Read and check everything. Raises ConfigError with a line for each thing that is wrong."""
    known = {variable.name: variable for variable in VARIABLES}
    wrong = [_unknown(name, known) for name, value in sorted(environ.items()) if _is_stranger(name, value, known)]
    values: dict[str, Any] = {}
    given = set()
    for name, variable in known.items():
        text = environ.get(name, "").strip()
        if not text:
            values[variable.field] = variable.default_for(program)
            if variable.required:
                wrong.append(f"{name} is not set: {variable.rule.meaning} Set it to {_an_example(variable)}.")
            continue
        given.add(variable.field)
        try:
            values[variable.field] = variable.rule.read(text)
        except ValueError as error:
            wrong.append(f"{name}={text}: allowed is {error}.")
    if not wrong:
        settings = Settings(**values, given=frozenset(given))
        wrong = _contradictions(settings)
        if check_files:
            wrong += _missing_files(settings)
        if not wrong:
            return settings
    raise ConfigError("\n".join(wrong))


def _is_stranger(name: str, value: str, known: Mapping[str, Variable]) -> bool:
    if not name.startswith(PREFIX) or name in known or INJECTED.search(name):
        return False
    return not (name.endswith("_PORT") and INJECTED_URL.match(value))


def _unknown(name: str, known: Mapping[str, Variable]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
    return f"{name} is not a variable of this program. The nearest is {nearest}; `chronik config` shows all of them."


def _an_example(variable: Variable) -> str:
    return "a directory of its own" if isinstance(variable.rule, Directory) else "1, 2, 3 …, each node its own"


def _contradictions(settings: Settings) -> list[str]:
    """What no single variable shows."""
    wrong = []
    interval, timeout = settings.replication_heartbeat_interval_secs, settings.replication_heartbeat_timeout_secs
    if timeout <= interval:
        wrong.append(
            f"CHRONIK_REPLICATION_HEARTBEAT_TIMEOUT_SECS={show(timeout)}: must be more than "
            f"CHRONIK_REPLICATION_HEARTBEAT_INTERVAL_SECS ({show(interval)}), best three times as much."
        )
    for door in ("replication", "kafka", "http"):
        cert, key = getattr(settings, f"{door}_tls_cert"), getattr(settings, f"{door}_tls_key")
        ca = getattr(settings, f"{door}_tls_ca", None)
        needed = {"CERT": cert, "KEY": key} | ({"CA": ca} if door == "replication" else {})
        if any((cert, key, ca)) and not all(needed.values()):
            missing = " and ".join(f"CHRONIK_{door.upper()}_TLS_{part}" for part, value in needed.items() if not value)
            wrong.append(f"{missing} must be set too: TLS needs {', '.join(needed)}.")
    doors = [("CHRONIK_KAFKA_BIND_ADDR", settings.kafka_bind_addr), ("CHRONIK_HTTP_BIND_ADDR", settings.http_bind_addr)]
    if settings.wal_receiver_enabled:
        doors.append(("CHRONIK_WAL_RECEIVER_BIND_ADDR", settings.wal_receiver_bind_addr))
    taken: dict[str, str] = {}
    for name, address in doors:
        if address in taken and split_address(address)[1] != 0:
            wrong.append(f"{name}={address}: {taken[address]} has that address already. Give each its own port.")
        taken[address] = name
    if is_wildcard(split_address(settings.kafka_bind_addr)[0]) and not settings.kafka_advertised_addr:
        wrong.append(
            f"CHRONIK_KAFKA_BIND_ADDR={settings.kafka_bind_addr}: clients cannot connect to a wildcard. Set "
            f"CHRONIK_KAFKA_ADVERTISED_ADDR to the host:port by which they reach this node."
        )
    return wrong if settings.insecure else wrong + _exposures(settings)


def _exposures(settings: Settings) -> list[str]:
    """Doors open beyond loopback that anyone could walk through."""
    wrong = []

    def refuse(name: str, address: str, missing: str) -> None:
        if not is_loopback(split_address(address)[0]):
            wrong.append(
                f"{name}={address}: beyond loopback. Set {missing}, or CHRONIK_INSECURE=true in a network you trust."
            )

    if not settings.replication_tls_cert:
        needed = "CHRONIK_REPLICATION_TLS_CERT, _KEY and _CA (`chronik certs` makes them)"
        if settings.wal_receiver_enabled:
            refuse("CHRONIK_WAL_RECEIVER_BIND_ADDR", settings.wal_receiver_bind_addr, needed)
        for follower in settings.replication_followers:
            refuse("CHRONIK_REPLICATION_FOLLOWERS", follower, needed)
    if not settings.kafka_tls_cert:
        refuse("CHRONIK_KAFKA_BIND_ADDR", settings.kafka_bind_addr, "CHRONIK_KAFKA_TLS_CERT and _KEY")
    if not settings.kafka_users_file and not settings.kafka_tls_ca:
        needed = "CHRONIK_KAFKA_USERS_FILE (`chronik users add` makes it) or CHRONIK_KAFKA_TLS_CA"
        refuse("CHRONIK_KAFKA_BIND_ADDR", settings.kafka_bind_addr, needed)
    if not settings.http_tls_cert:
        refuse("CHRONIK_HTTP_BIND_ADDR", settings.http_bind_addr, "CHRONIK_HTTP_TLS_CERT and _KEY")
    return wrong


def _missing_files(settings: Settings) -> list[str]:
    wrong = []
    for variable in VARIABLES:
        path = getattr(settings, variable.field)
        if isinstance(variable.rule, File) and path is not None:
            try:
                path.open("rb").close()
            except OSError as error:
                wrong.append(
                    f"{variable.name}={path}: cannot be read ({error.strerror}). Give a file that this user can read."
                )
    if settings.data_dir.exists() and not settings.data_dir.is_dir():
        wrong.append(f"CHRONIK_DATA_DIR={settings.data_dir}: is a file. Name a directory, or one that is to be made.")
    return wrong
