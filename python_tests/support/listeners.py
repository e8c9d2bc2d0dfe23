"""The addresses on which processes listen, from Linux's /proc."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

LISTEN = "0A"  # TCP_LISTEN in include/net/tcp_states.h


def family(pid: int) -> set[int]:
    """The pids of a process and its running descendants."""
    found, new = set[int](), {pid}
    while new:
        found |= new
        new = {child for parent in new for child in _children(parent)} - found
    return found


def listeners(pids: Iterable[int]) -> dict[int, set[str]]:
    """By pid: address and port of each listening TCP socket, names of abstract Unix sockets."""
    return {pid: found for pid in sorted(pids) if (found := _listens(pid))}


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(c) for task in tasks for c in (task / "children").read_text().split()]
    except OSError:  # it has ended
        return []


def _listens(pid: int) -> set[str]:
    inodes = set()
    with suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for kind in ("tcp", "tcp6"):
        for line in _lines(pid, kind):
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                found.add(f"{_address(address)}:{int(port, 16)}")
    for line in _lines(pid, "unix"):
        fields = line.split()
        if len(fields) > 7 and fields[6] in inodes and fields[7].startswith("@"):
            found.add(fields[7])
    return found


def _lines(pid: int, kind: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]
    except OSError:
        return []


def _address(text: str) -> str:
    """The address, which the kernel writes as hexadecimal words in native byte order."""
    words = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed)
