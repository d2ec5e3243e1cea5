"""Two hosts that are network namespaces, each with its own name and address, and a pair of virtual
network cards between them. Linux and root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Host:
    """A network namespace with a name and an address."""

    number: int

    @property
    def name(self) -> str:
        """Name of the namespace and of the host in it."""
        return f"nmt-host-{self.number}"

    @property
    def address(self) -> str:
        """Address of its network card."""
        return f"10.77.0.{self.number + 1}"

    def inside(self, *command: str) -> list[str]:
        """Return a command that runs `command` on this host."""
        script = f'echo {self.name} > /proc/sys/kernel/hostname; exec "$@"'
        return [
            *("ip", "netns", "exec", self.name),
            *("unshare", "--uts", "sh", "-c", script, "sh", *command),
        ]

    def pids(self) -> list[int]:
        """Return the processes of this host."""
        return [int(pid) for pid in shell("ip", "netns", "pids", self.name).split()]

    def lose(self) -> None:
        """Kill all its processes at once."""
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)


HOSTS = (Host(0), Host(1))


@contextmanager
def network() -> Iterator[None]:
    """Make two hosts with names, addresses and a cable between them; remove them at the end."""
    remove_network()
    try:
        names = "".join(f"{host.address} {host.name}\n" for host in HOSTS)
        for host in HOSTS:
            shell("ip", "netns", "add", host.name)
            etc = Path("/etc/netns") / host.name  # `ip netns exec` shows it as /etc/hosts
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n{names}", encoding="utf-8")
        one, other = (host.name for host in HOSTS)
        peer = ("type", "veth", "peer", "name", "eth0", "netns", other)
        shell("ip", "link", "add", "eth0", "netns", one, *peer)
        for host in HOSTS:
            shell("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            for card in ("lo", "eth0"):
                shell("ip", "-n", host.name, "link", "set", card, "up")
        yield
    finally:
        remove_network()


def remove_network() -> None:
    """Remove what `network` made, with all that runs there."""
    existing = shell("ip", "netns", "list").split()
    for host in HOSTS:
        if host.name in existing:
            host.lose()
            shell("ip", "netns", "delete", host.name)
        shutil.rmtree(Path("/etc/netns") / host.name, ignore_errors=True)


def shell(*command: str) -> str:
    """Run a command and return what it prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
