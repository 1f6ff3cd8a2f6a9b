"""Two hosts on one machine: network namespaces with names and addresses of their own, and a cable between them that
can be cut."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class TwoHosts:
    """Hosts 0 and 1. Root is needed; see `why_not`."""

    def __init__(self, tag: str, folder: Path) -> None:
        """tag: makes the names of the namespaces unique, six letters at most."""
        self.names = (f"node-a-{tag}", f"node-b-{tag}")
        self.addresses = ("10.77.53.1", "10.77.53.2")
        self._cables = (f"cab-a-{tag}", f"cab-b-{tag}")
        self.mounts: tuple[dict[Path, Path], ...] = ({}, {})  # of each host: path -> what lies there instead
        self._table = folder / "hosts"  # what /etc/hosts is on both
        self._table.write_text(
            "127.0.0.1 localhost\n"
            + "".join(f"{address} {name}\n" for address, name in zip(self.addresses, self.names))
        )

    def start(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        _ip(
            "link",
            "add",
            self._cables[0],
            "netns",
            self.names[0],
            "type",
            "veth",
            "peer",
            "name",
            self._cables[1],
            "netns",
            self.names[1],
        )
        for name, cable, address in zip(self.names, self._cables, self.addresses):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", cable)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", cable, "up")

    def stop(self) -> None:
        for name in self.names:  # the cable goes with them
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def cut_the_cable(self) -> None:
        """Drops all packets without notifying either side, as when a switch dies."""
        _ip("-n", self.names[1], "link", "set", self._cables[1], "down")

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """The command, on that host."""
        mounts = "".join(f" && mount --bind '{other}' '{path}'" for path, other in self.mounts[host].items())
        inside = f'hostname "$1" && mount --bind "$2" /etc/hosts{mounts} && shift 2 && exec "$@"'
        enter = [
            "ip",
            "netns",
            "exec",
            self.names[host],
            "unshare",
            "--uts",
            "--mount",
            "sh",
            "-c",
            inside,
            "sh",
            self.names[host],
            str(self._table),
        ]
        return [*enter, *command]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    hosts = TwoHosts(f"{os.getpid() % 100000}", folder)
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.stop()


def why_not() -> str | None:
    """Returns why this machine cannot simulate two hosts, or None."""
    probe = f"probe-{os.getpid()}"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "exec", probe, "unshare", "--uts", "--mount", "true")
    except FileNotFoundError:
        return "the command `ip` is missing"
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here ({error.stderr.strip()})"
    finally:
        subprocess.run(["ip", "netns", "delete", probe], check=False, capture_output=True)
    return None
