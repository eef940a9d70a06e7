"""The two programs: `chronik-leader` and `chronik-follower`. One process, one node, configured by its environment.

One line when it is ready and one a change of state. SIGTERM and SIGINT drain and end it. Exit codes, for those who
restart it:

    0  stopped as asked
    1  a bug: the traceback says where
    2  the configuration is wrong
    3  the data directory cannot be used: damaged, of another cluster or node, or of a newer version
    4  the disk failed: nothing more was acked after that
    5  this node cannot lead: another one does, or holds the log that this one lacks
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import structlog
import trio

from chronik_repl import __version__, control
from chronik_repl.config import Program, Settings, load
from chronik_repl.errors import (
    CannotLead,
    ChronikError,
    ConfigError,
    CorruptLog,
    DiskFailed,
    ForeignLog,
    FormatTooNew,
)
from chronik_repl.http.server import serve as serve_http
from chronik_repl.http.server import server_context
from chronik_repl.kafka.server import serve as serve_kafka
from chronik_repl.kafka.tls import client_context
from chronik_repl.kafka.users import read as read_users
from chronik_repl.listening import listen
from chronik_repl.node import Door, Node, run_node
from chronik_repl.notify import notify
from chronik_repl.replication.tcp import TcpNetwork, tls_contexts
from chronik_repl.values import show_size
from chronik_repl.wal.disk import RealDisk, refuse_in_use

EXIT_CODES: Mapping[type[BaseException], int] = {
    DiskFailed: 4,
    CorruptLog: 3,
    ForeignLog: 3,
    FormatTooNew: 3,
    ConfigError: 2,
    CannotLead: 5,
}

HELP = """examples:
  CHRONIK_NODE_ID={node} CHRONIK_DATA_DIR=data/{node} chronik-{program}
  chronik config config/{program}.env --as {program}      checks a file of variables, before a start

exit codes: 0 stopped as asked, 1 a bug, 2 configuration, 3 data directory, 4 disk, 5 cannot lead"""
# The collector of cyclic garbage looks when so many objects more were made than freed, and at older ones so seldom.
GC_THRESHOLDS = (10_000, 20, 50)
# glibc's malloc: freed memory of so many bytes is kept, and blocks up to that size come from there (malloc.h: mallopt).
M_TRIM_THRESHOLD, KEPT_BYTES = -1, 32 * 1024 * 1024
M_MMAP_THRESHOLD, BLOCK_BYTES_MAX = -3, 16 * 1024 * 1024
# Open files that are not Kafka connections: 256 of other nodes, 200 of HTTP, 64 segments, the rest of the program.
FILES_RESERVED, CONNECTIONS_MIN = 640, 16
SPACE_INTERVAL_S = 2.0
DAMAGE_ADVICE = (  # where a message has none of its own
    ". `chronik wal verify` shows all of it. Put back what is missing, or start this directory with chronik-follower, "
    "which sets the damage aside and gets it again from a leader; where this one led, promote another node"
)

logger = structlog.get_logger("chronik")


def leader() -> None:
    sys.exit(main("leader", sys.argv[1:]))


def follower() -> None:
    sys.exit(main("follower", sys.argv[1:]))


def main(program: Program, arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    parser = argparse.ArgumentParser(
        prog=f"chronik-{program}",
        description=f"A node of a chronik-repl cluster, started as a {program}. It is configured by environment "
        "variables:\n`chronik config` shows every one, its value and its meaning.",
        epilog=HELP.format(program=program, node=1 if program == "leader" else 2),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"chronik-repl {__version__}")
    parser.parse_args(arguments)
    try:
        settings = load(environ, program)
        set_up_logging(settings)
        _keep_memory()
        trio.run(run, _with_files_for(settings), program)
    except ConfigError as error:
        for line in str(error).splitlines():
            print(f"chronik-{program}: {line}", file=sys.stderr)
        return 2
    except ChronikError as error:
        return _report(error)
    except BaseExceptionGroup as group:
        known = sorted(_leaves(group), key=_rank)
        if not known or not isinstance(known[0], ChronikError):
            raise
        return _report(known[0])
    return 0


async def run(settings: Settings, program: Program) -> None:
    """One node with its doors, until a signal."""
    tls = None
    if settings.replication_tls_cert and settings.replication_tls_key and settings.replication_tls_ca:
        tls = tls_contexts(
            str(settings.replication_tls_cert), str(settings.replication_tls_key), str(settings.replication_tls_ca)
        )
    network = TcpNetwork(tls)
    doors: dict[str, Door] = {"kafka": serve_kafka, "http": serve_http}
    refuse_in_use(settings.data_dir)
    await _try_doors(settings)
    try:
        disk = RealDisk(settings.data_dir)
    except OSError as error:
        raise ConfigError(
            f"CHRONIK_DATA_DIR={settings.data_dir}: cannot be made: {error.strerror or error}. Name a folder that this "
            "user may write to"
        ) from error
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:

            async def node_task(task_status: trio.TaskStatus[Node]) -> None:
                try:
                    await run_node(settings, disk, network, program=program, doors=doors, task_status=task_status)
                except (PermissionError, NotADirectoryError, IsADirectoryError) as error:
                    if error.filename is None:
                        raise  # not of the directory: a bug
                    raise ForeignLog(
                        f"{error.filename}: {error.strerror}. Give {settings.data_dir} and all that is in it to this "
                        "process's user, as a node left it, or name another directory"
                    ) from error
                nursery.cancel_scope.cancel()

            node = await nursery.start(node_task)
            await nursery.start(control.serve, settings.data_dir, node.command)
            nursery.start_soon(_tell_ready, node, settings)
            nursery.start_soon(_watch_space, node, disk, settings.min_free_bytes)
            async for _ in signals:
                notify("STOPPING=1")
                nursery.start_soon(node.stop)


async def _try_doors(settings: Settings) -> None:
    """Before anything is made in the data directory: their ports are free, their files are good. They open later, after
    recovery: until then whoever dials is refused at once, instead of waiting."""
    server_context(settings)
    client_context(settings)
    if settings.kafka_users_file is not None:
        read_users(settings.kafka_users_file)
    wanted = {"CHRONIK_KAFKA_BIND_ADDR": settings.kafka_bind_addr, "CHRONIK_HTTP_BIND_ADDR": settings.http_bind_addr}
    if settings.wal_receiver_enabled:
        wanted["CHRONIK_WAL_RECEIVER_BIND_ADDR"] = settings.wal_receiver_bind_addr
    with contextlib.ExitStack() as stack:
        for variable, address in wanted.items():
            for listener in await listen(variable, address):
                stack.callback(listener.close)


def _keep_memory() -> None:
    """A batch is often a megabyte. Given back to the system after each and taken anew for the next, every page of it
    would be zeroed and mapped again: a twelfth of all servers' CPU under load."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries do without
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_MMAP_THRESHOLD, BLOCK_BYTES_MAX)


def _with_files_for(settings: Settings) -> Settings:
    """A client must never take the last open file: the log's next segment could not be opened, which ends the process.
    So the usual limit of 1,024 is raised as far as it may be, and where that is not enough fewer clients are let in."""
    wanted = settings.kafka_max_connections + FILES_RESERVED
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        allowed = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
        if allowed < wanted:
            room = max(CONNECTIONS_MIN, allowed - FILES_RESERVED)
            logger.warning(
                f"{allowed} open files are allowed: only {room} Kafka connections are taken; `ulimit -n {wanted}` "
                f"(LimitNOFILE in systemd) gives CHRONIK_KAFKA_MAX_CONNECTIONS its {settings.kafka_max_connections}"
            )
            return msgspec.structs.replace(settings, kafka_max_connections=room)
    return settings


def _settle() -> None:
    """What is loaded by now stays: modules, codecs, the log's state. To look through all of it for garbage takes 25 ms
    and more, in which nothing is acked. So the collector leaves it alone, and looks at the rest less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


async def _tell_ready(node: Node, settings: Settings) -> None:
    await node.wait_ready()
    _settle()
    status = node.status()
    logger.info(
        "ready",
        role=status.role,
        node=status.node_id,
        cluster=status.cluster_id,
        epoch=status.epoch,
        kafka=node.addresses["kafka"],
        http=node.addresses["http"],
        replication=node.addresses["replication"],
        acks_all=status.acks_all_means,
    )
    notify(f"READY=1\nSTATUS={status.role} of {status.cluster_id}")


async def _watch_space(node: Node, disk: RealDisk, floor_bytes: int) -> None:
    """Below the floor whoever produces is told of a disk error, and no more: why, and what to do, is said here."""
    short = False
    while True:
        if (disk.free_bytes() < floor_bytes) != short:
            short = not short
            if short:
                node.say(
                    "warning",
                    f"less than CHRONIK_MIN_FREE_BYTES ({show_size(floor_bytes)}) are free on the disk: appends are "
                    "refused, reads go on. Free some space, or lower that variable",
                )
            else:
                node.say("info", "the disk has room again: appends are taken")
        await trio.sleep(SPACE_INTERVAL_S)


def set_up_logging(settings: Settings) -> None:
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    shared: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: Any = structlog.processors.JSONRenderer()
    if settings.log_format == "console":
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def _report(error: ChronikError) -> int:
    code = next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)
    advised = not isinstance(error, CorruptLog) or "`chronik " in str(error)
    logger.error(f"stopped: {error}{'' if advised else DAMAGE_ADVICE}", exit_code=code)
    return code


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


def _rank(error: BaseException) -> int:
    """A bug first (it needs its traceback), then by what matters most."""
    kinds = list(EXIT_CODES)
    place = next((at for at, kind in enumerate(kinds) if isinstance(error, kind)), len(kinds))
    return place if isinstance(error, ChronikError) else -1
