"""The story, told on a terminal: `scripts/demo`, or `python -m chronik_repl.demo`."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.markup import escape

from chronik_repl.demo.cluster import Cluster, DemoFailed
from chronik_repl.demo.family import adopt_orphans, dies_with_us, end_children
from chronik_repl.demo.scratch import scratch_folder
from chronik_repl.demo.shop import Shop

ORDERS_PER_S = 1500
FIRST_ORDERS = 3000
AWAY_S = 6.0
EXAMPLES = """examples:
  scripts/demo            tells the story, then leaves the cluster running until Ctrl-C
  scripts/demo --exit     tells the story and ends: exit code 0 if all copies are the same

It takes free ports and a temporary folder, so several can run at once, and nothing is left behind. After kill -9 the
nodes end too; the folder goes with the next demo."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="demo",
        description="A leader, two followers and a small shop on this machine.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--exit", action="store_true", help="end after the verdict")
    parser.add_argument("--away", type=float, default=AWAY_S, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    console = Console(highlight=False)
    if importlib.util.find_spec("confluent_kafka") is None:
        needed = "demo: confluent-kafka is missing. Run scripts/setup, or: pip install 'chronik-repl[demo]'"
        console.print(needed, markup=False, soft_wrap=True)
        return 2
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, _interrupt)
    adopt_orphans()
    try:
        with scratch_folder() as folder:
            cluster = Cluster(folder)
            try:
                return tell(console, cluster, folder, exit_after=arguments.exit, away_s=arguments.away)
            finally:
                for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(name, signal.SIG_IGN)  # a second Ctrl-C does not leave processes behind
                cluster.stop()
                end_children()
    except DemoFailed as error:
        console.print(f"[red]✗[/] {escape(str(error))}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("\n[dim]ended[/]")
        return 130


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def tell(console: Console, cluster: Cluster, folder: Path, *, exit_after: bool, away_s: float) -> int:
    with step(console, "a leader and two followers start, each a process of its own"):
        cluster.start()
    console.print(f"  [bold]look at it:[/] [link={cluster.leader.page}]{cluster.leader.page}[/link]", soft_wrap=True)
    console.print(f"  [dim]Kafka clients: {cluster.leader.kafka}, files: {folder}[/]", soft_wrap=True)
    shop = Shop(cluster.leader.kafka, ORDERS_PER_S)
    shop.open()
    try:
        with step(console, "a small shop opens and takes orders (acks=all: on the leader's disk and a follower's)"):
            cluster.wait("the first orders were acked", lambda: shop.acked > FIRST_ORDERS)
        lost_and_found(console, cluster, shop, away_s)
        if exit_after:
            shop.close()
        code = prove(console, cluster, shop, folder)
        if not exit_after:
            stay(console, cluster, shop)
        return code
    finally:
        shop.close()


def lost_and_found(console: Console, cluster: Cluster, shop: Shop, away_s: float) -> None:
    victim = cluster.followers[-1]
    before = shop.acked
    victim.kill()
    with step(console, f"kill -9 of node {victim.node_id}; the shop goes on") as say:
        until = time.monotonic() + away_s
        while time.monotonic() < until:
            behind = cluster.follower_status(victim.node_id)
            more, missed = shop.acked - before, behind["lag_positions"]
            say(f"{more:,} more orders acked, node {victim.node_id} misses {missed:,} bytes")
            time.sleep(0.2)
        cluster.wait("orders were acked without it", lambda: shop.acked > before)
    with step(console, f"node {victim.node_id} starts again and catches up by itself") as say:
        victim.start()

        def caught_up() -> bool:
            seen = cluster.follower_status(victim.node_id)
            say(f"{seen['state']}, {seen['lag_positions']:,} bytes behind")
            return bool(seen["state"] == "streaming" and seen["lag_records"] < ORDERS_PER_S)

        cluster.wait(f"node {victim.node_id} had caught up", caught_up)


def prove(console: Console, cluster: Cluster, shop: Shop, folder: Path) -> int:
    """Two independent proofs: a consumer on a follower, and Spark over the files of all three."""
    acked = shop.acked
    with step(console, "an auditor reads every order, from a follower"):
        missing = shop.check(cluster.followers[-1].kafka)
        if missing:
            raise DemoFailed(missing)
    with step(console, "Spark compares the three logs, byte for byte, while the cluster runs"):
        code, output = parity(cluster, folder)
    console.print(output.rstrip(), markup=False, style="dim", soft_wrap=True)
    if code:
        console.print(f"[bold red]✗ the copies are not proved the same (exit code {code})[/]")
        return 1
    console.print(f"[bold green]✓ {acked:,} orders acked, none lost, none doubled; all three copies are the same[/]")
    return 0


def parity(cluster: Cluster, folder: Path) -> tuple[int, str]:
    command = [str(Path(sys.executable).parent / "chronik"), "parity"]
    command += [f"node{node.node_id}={node.data_dir}" for node in cluster.nodes]
    command += ["--leader", f"http://{cluster.leader.http}"]
    scratch = folder / "spark"
    scratch.mkdir()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CHRONIK_")}
    environ |= {"TMPDIR": str(scratch), "SPARK_LOCAL_DIRS": str(scratch), "COLUMNS": "110"}
    environ["JAVA_TOOL_OPTIONS"] = f"-XX:-UsePerfData -Djava.io.tmpdir={scratch}"  # nothing outside the folder
    done = subprocess.run(command, cwd=scratch, env=environ, capture_output=True, text=True, preexec_fn=dies_with_us())
    return done.returncode, done.stdout + (done.stderr if done.returncode else "")


def stay(console: Console, cluster: Cluster, shop: Shop) -> None:
    console.print(f"\nThe shop stays open. [bold]{cluster.leader.page}[/]  Ctrl-C ends everything.", soft_wrap=True)
    console.print(f"  kcat -b {cluster.leader.kafka} -t orders -C -o -5 -e", style="dim", soft_wrap=True)
    console.print(f"  .venv/bin/chronik status --watch --http {cluster.leader.http}", style="dim", soft_wrap=True)
    while True:
        cluster.wait("for ever", lambda: False, timeout_s=1e9)


@contextlib.contextmanager
def step(console: Console, what: str) -> Iterator[Callable[[str], None]]:
    """A line that says what happens, and then that it did, and how long it took."""
    began = time.monotonic()
    with console.status(what) as status:
        yield lambda text: status.update(f"{what}: {text}")
    console.print(f"[green]✓[/] {what} [dim]({time.monotonic() - began:.1f} s)[/]", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
