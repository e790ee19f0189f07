"""Emulated hosts: network namespaces joined by a bridge, over links of limited rate, with gloo ranks in each.

A rank enters its host's namespace before it has a socket. Ranks of one host use its loopback device, so counters of
its link count bytes across hosts. The bridge has a namespace of its own, so that sessions share nothing."""

import ctypes
import os
import re
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.ranks import Ranks

CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000
LINK, PORT = "eth0", 29500
SUBNET = "10.77.0"


@dataclass(frozen=True)
class Host:
    """The place of a rank. `master`: the address of the first host."""

    namespace: str
    master: str = f"{SUBNET}.1"
    port: int = PORT

    def enter(self) -> None:
        """Move this process to the host, and let it have a host name of its own."""
        libc = ctypes.CDLL(None, use_errno=True)
        file = os.open(f"/run/netns/{self.namespace}", os.O_RDONLY)
        entered = libc.setns(file, CLONE_NEWNET) == 0 and libc.unshare(CLONE_NEWUTS) == 0
        os.close(file)
        if not entered:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {self.namespace}")
        socket.sethostname(self.namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = LINK


class Hosts(Ranks):
    """`hosts` emulated hosts with `gpus` ranks each; ranks of one host follow on each other."""

    def __init__(self, hosts: int, gpus: int, rate: str = "1gbit"):
        super().__init__(hosts * gpus)
        self.gpus = gpus
        self.rate = rate
        prefix = f"zc{os.getpid()}"
        self.switch = f"{prefix}-switch"
        self.namespaces = [f"{prefix}-host{i}" for i in range(hosts)]
        self.made: list[str] = []
        try:
            self._make()
        except (OSError, subprocess.CalledProcessError) as error:
            self.remove()
            reason = getattr(error, "stderr", "") or error
            pytest.skip(f"hosts are emulated by network namespaces, which cannot be made here: {reason}".strip())

    def _make(self) -> None:
        for namespace in (self.switch, *self.namespaces):
            _run("ip", "netns", "add", namespace)
            self.made.append(namespace)
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
        _run("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self.switch, "link", "set", "bridge", "up")
        for i, namespace in enumerate(self.namespaces):
            peer = ["peer", "name", f"host{i}", "netns", self.switch]
            _run("ip", "-n", namespace, "link", "add", LINK, "type", "veth", *peer)
            _run("ip", "-n", self.switch, "link", "set", f"host{i}", "master", "bridge", "up")
            _run("ip", "-n", namespace, "address", "add", f"{SUBNET}.{i + 1}/24", "dev", LINK)
            _run("ip", "-n", namespace, "link", "set", LINK, "up")
            _run("tc", "-n", namespace, "qdisc", "add", *_limit(self.rate))

    def host_of(self, rank: int) -> Host:
        return Host(self.namespaces[rank // self.gpus])

    def stop(self) -> None:
        """End the ranks, and make all links whole again: a test may have cut or throttled one."""
        super().stop()
        for namespace in self.made[1:]:
            _run("ip", "-n", namespace, "link", "set", LINK, "up")
            _run("tc", "-n", namespace, "qdisc", "change", *_limit(self.rate))

    def remove(self) -> None:
        """End the ranks and remove the hosts."""
        super().stop()
        for namespace in self.made:
            subprocess.run(["ip", "netns", "delete", namespace], check=False)
        self.made = []


def received_bytes() -> int:
    """Bytes that came over the link of this rank's host until now: with headers, and those for all its ranks."""
    found = re.search(rf"^ *{LINK}: *(\d+)", Path("/proc/self/net/dev").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def cut_link() -> None:
    """From now on nothing comes to this rank's host or leaves it, and no other host is told, as if it lost power."""
    _run("ip", "link", "set", LINK, "down")


def throttle_link(rate: str) -> None:
    """From now on this rank's host sends no faster than `rate`, which `tc` understands."""
    _run("tc", "qdisc", "change", *_limit(rate))


def _limit(rate: str) -> list[str]:
    return ["dev", LINK, "root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
