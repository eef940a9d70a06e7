"""A small network of the machine's own: a namespace a node, a bridge between them, and links that can be cut one way.

Needs root and `ip`; `available()` says whether it is there. A cut from A to B is a blackhole route in A's namespace:
what B sends still arrives. A slow link is a token bucket on the node's interface.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


def run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if check and done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def available() -> str:
    """Why it cannot be used here; "" when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}` here"
    name = f"chronik-try-{os.getpid()}"
    try:
        run("ip", "netns", "add", name)
        run("ip", "netns", "del", name)
    except OSError as error:
        return f"network namespaces do not work here: {error}"
    return ""


class Namespaces:
    def __init__(self, nodes: Sequence[int]) -> None:
        self._tag = f"{os.getpid() % 100_000:x}"
        pid = os.getpid()
        self._net = f"10.{64 + pid % 128}.{pid // 128 % 256}"
        self.nodes = tuple(nodes)
        self.bridge = f"cb{self._tag}"

    def name(self, node: int) -> str:
        return f"c{self._tag}n{node}"

    def host(self, node: int) -> str:
        """0 is the bridge itself, where the test stands."""
        return f"{self._net}.{node + 1}"

    def prefix(self, node: int) -> tuple[str, ...]:
        """What makes a command run on that node."""
        return ("ip", "netns", "exec", self.name(node))

    def up(self) -> None:
        run("ip", "link", "add", self.bridge, "type", "bridge")
        run("ip", "addr", "add", f"{self.host(0)}/24", "dev", self.bridge)
        run("ip", "link", "set", self.bridge, "up")
        for node in self.nodes:
            name = self.name(node)
            run("ip", "netns", "add", name)
            run("ip", "link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b")
            run("ip", "link", "set", f"{name}a", "master", self.bridge, "up")
            run("ip", "link", "set", f"{name}b", "netns", name)
            run(*self.prefix(node), "ip", "addr", "add", f"{self.host(node)}/24", "dev", f"{name}b")
            run(*self.prefix(node), "ip", "link", "set", f"{name}b", "up")
            run(*self.prefix(node), "ip", "link", "set", "lo", "up")

    def down(self) -> None:
        for node in self.nodes:
            run("ip", "netns", "del", self.name(node), check=False)
            run("ip", "link", "del", f"{self.name(node)}a", check=False)
        run("ip", "link", "del", self.bridge, check=False)

    def cut(self, source: int, target: int) -> None:
        """What `source` sends to `target` goes nowhere."""
        run(*self.prefix(source), "ip", "route", "replace", "blackhole", f"{self.host(target)}/32")

    def slow(self, node: int, rate: str = "2mbit") -> None:
        """What that node sends goes out slowly."""
        device = f"{self.name(node)}b"
        shape = ("tbf", "rate", rate, "burst", "32kbit", "latency", "400ms")
        run(*self.prefix(node), "tc", "qdisc", "replace", "dev", device, "root", *shape)

    def throttled(self, node: int) -> bool:
        """Has anything had to wait for the token bucket?"""
        said = run(*self.prefix(node), "tc", "-s", "qdisc", "show", "dev", f"{self.name(node)}b")
        found = re.search(r"overlimits (\d+)", said)
        return found is not None and int(found[1]) > 0

    def mend(self) -> None:
        for node in self.nodes:
            run(*self.prefix(node), "tc", "qdisc", "del", "dev", f"{self.name(node)}b", "root", check=False)
            for other in self.nodes:
                run(*self.prefix(node), "ip", "route", "del", "blackhole", f"{self.host(other)}/32", check=False)


@contextmanager
def namespaces(nodes: Sequence[int]) -> Iterator[Namespaces]:
    made = Namespaces(nodes)
    try:
        made.up()
        yield made
    finally:
        made.down()


@contextmanager
def small_disk(path: str, mib: int) -> Iterator[None]:
    """A file system that can be filled."""
    os.makedirs(path, exist_ok=True)
    run("mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", path)
    try:
        yield
    finally:
        run("umount", "-l", path, check=False)
