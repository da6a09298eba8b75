"""Several hosts on one machine: network namespaces behind a switch, every cable with a rate of its own.

    host 0                      switch                    host 1
    10.77.0.1 eth0 ----------- port0 ) bridge ( port1 ------------- eth0 10.77.0.2
              tbf: its way out  tbf: its way in             tbf       tbf

A host is a network and a process namespace, held by a process of ours. Nothing has a name that could be left behind:
when that process ends, for whatever reason, SIGKILL of this one included, Linux ends every process of the host, and
with the last of them its interfaces and addresses go. The addresses exist in these namespaces alone, and no interface
of the machine itself is connected to them.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

INTERFACE = "eth0"
MTU = 9000
"""Jumbo frames, as in a cluster: a sixth of the packets, each of which costs the cores time."""
QUEUE_S = 0.1
"""How long a packet may wait in a cable's queue before it is dropped."""
BURST_S = 250e-6
"""What may pass at once after a pause, as time at the cable's rate: more than a timer of two busy cores is late by,
which would otherwise be lost, and little beside the messages, of which it is the part that passes for free."""


_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")
"""A command that Linux ends when this process does. Python could ask for that between fork and exec, but a signal that
comes in there is lost: what its handler raises is dropped."""


def what_is_missing() -> list[str]:
    """What hosts need and this machine has not, in words."""
    if not Path("/proc/self/ns/net").exists():
        return ["network namespaces, which only Linux has"]
    tools = {"ip": "iproute2", "tc": "iproute2"} | dict.fromkeys(("nsenter", "setpriv", "unshare"), "util-linux")
    missing = [f"`{tool}` (Debian package {package})" for tool, package in tools.items() if shutil.which(tool) is None]
    return missing + (["root"] if os.geteuid() != 0 else [])


@dataclass(frozen=True)
class Host:
    """One network and process namespace, and the process that holds it."""

    holder: "subprocess.Popen[bytes]"
    pid: int
    """Of the first process inside: the others end with it."""
    address: str

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command, to be started on this host."""
        return ["nsenter", "--target", str(self.pid), "--net", "--pid", "--", *command]

    def run(self, *command: str) -> None:
        """Set something up on this host, from outside: its network, but the machine's process numbers."""
        enter = ["nsenter", "--target", str(self.pid), "--net", "--"]
        done = subprocess.run([*enter, *command], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


class Hosts:
    """Between two and four hosts for as long as the context lasts."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._switch: Host | None = None
        self.all: list[Host] = []
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Hosts":
        try:
            self._switch = _make_host("")
            self._switch.run("ip", "link", "add", "bridge", "type", "bridge")
            self._switch.run("ip", "link", "set", "bridge", "up")
            for index in range(self._count):
                self.all.append(_make_host(f"10.77.0.{index + 1}"))
                self._connect(self.all[-1], index)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connect(self, host: Host, index: int) -> None:
        assert self._switch is not None, "the switch comes first"
        port = f"port{index}"
        peer = ("peer", "name", port, "netns", str(self._switch.pid))
        host.run("ip", "link", "add", INTERFACE, "mtu", str(MTU), "type", "veth", *peer)
        host.run("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE)
        host.run("ip", "link", "set", "lo", "up")
        host.run("sh", "-c", "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6")
        host.run("ip", "link", "set", INTERFACE, "up")
        # Congestion control as most hosts have it, whatever this machine has.
        network = ("10.77.0.0/24", "dev", INTERFACE, "src", host.address, "congctl", "cubic")
        host.run("ip", "route", "replace", *network)
        self._switch.run("ip", "link", "set", port, "mtu", str(MTU), "master", "bridge", "up")

    def set_rate(self, bits_s: float) -> None:
        """What every cable carries, in each direction."""
        assert self._switch is not None, "hosts are made on entering the context"
        burst = max(MTU + 100, int(bits_s / 8 * BURST_S))
        limit = burst + int(bits_s / 8 * QUEUE_S)
        for index, host in enumerate(self.all):
            for end, interface in ((host, INTERFACE), (self._switch, f"port{index}")):
                shape = ("rate", f"{bits_s:.0f}bit", "burst", str(burst), "limit", str(limit))
                end.run("tc", "qdisc", "replace", "dev", interface, "root", "tbf", *shape)

    def start(
        self, index: int, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]
    ) -> "subprocess.Popen[bytes]":
        """Start a command on a host; it ends with the host at the latest."""
        process = subprocess.Popen(
            [*_WITH_US, *self.all[index].inside(command)],
            stdout=log,
            stderr=log,
            env=dict(environment),
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        self._started.append(process)
        return process

    def close(self) -> None:
        """End every host with everything on it, and wait until they are gone."""
        for host in [*self.all, *filter(None, [self._switch])]:
            try:
                os.kill(host.pid, signal.SIGKILL)
            except ProcessLookupError:
                host.holder.kill()
        for host in [*self.all, *filter(None, [self._switch])]:
            host.holder.communicate()
        for process in self._started:
            process.wait()
        self.all, self._switch, self._started = [], None, []


def _make_host(address: str) -> Host:
    apart = ["unshare", "--net", "--pid", "--fork", "--kill-child=SIGKILL", "--", "sleep", "infinity"]
    holder = subprocess.Popen(
        [*_WITH_US, *apart], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
    try:
        while not (found := children.read_text().split() if holder.poll() is None else []):
            if holder.poll() is not None:
                said = holder.stderr.read().decode().strip() if holder.stderr else ""
                raise RuntimeError(f"a host cannot be made: {said}")
            time.sleep(0.01)
        while Path(f"/proc/{found[0]}/comm").read_text().strip() != "sleep":  # it has its namespaces by then
            time.sleep(0.01)
        return Host(holder, int(found[0]), address)
    except BaseException:
        holder.kill()
        holder.communicate()
        raise
