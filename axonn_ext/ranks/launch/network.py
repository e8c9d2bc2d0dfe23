"""Checks whether ranks can connect to each other, before gloo spends minutes finding out."""

from __future__ import annotations

import fcntl
import json
import socket
import struct
from contextlib import nullcontext, suppress
from datetime import timedelta

from torch.distributed import Store

from axonn_ext.ranks.launch.place import Process
from axonn_ext.ranks.stores import comes
from axonn_ext.spec import settings
from axonn_ext.terminal.errors import MeetingError

_MOST_SECONDS = 30.0  # after which a connection attempt fails
_SIOCGIFADDR = 0x8915  # from linux/sockios.h


def check_connections(store: Store, process: Process) -> None:
    """Connects each rank to the next one, at the address that gloo will use. All ranks call it.

    The number of store operations per rank does not depend on the number of ranks.

    Raises: MeetingError, on every rank, naming the first rank that cannot be reached or lacks an
        interface, with its address and the variable to set; or if ranks do not come within
        AXONN_TIMEOUT_SECONDS.
    """
    timeout = settings.load().timeout_seconds
    seconds = min(timeout, _MOST_SECONDS)
    problem, listener = "", None
    try:
        listener = _listen()
    except OSError as error:
        problem = (
            f"gloo of rank {process.rank} cannot listen on host {socket.gethostname()}: {error}; "
            f"{advice()}"
        )
    with listener or nullcontext():
        where = listener.getsockname()[:2] if listener else None
        store.set(f"network/{process.rank}", json.dumps([where, socket.gethostname(), advice()]))
        if not problem:
            problem = _try(store, process, timedelta(seconds=timeout), seconds)
        if problem:
            store.compare_set("network/problem", "", problem)
        if store.add("network/done", 1) == process.world_size:
            store.set("network/all", "")
        comes(store, ["network/all"], timedelta(seconds=timeout + seconds))
    if store.check(["network/problem"]):
        said = store.get("network/problem").decode(errors="replace")
        raise MeetingError(f"the ranks cannot connect to each other: {said}")


def _try(store: Store, process: Process, patience: timedelta, seconds: float) -> str:
    """Connects to the next rank; returns why it cannot."""
    peer = (process.rank + 1) % process.world_size
    if not comes(store, [f"network/{peer}"], patience):
        return f"no word of rank {peer} after {patience.total_seconds():g} s"
    where, host, advice = json.loads(store.get(f"network/{peer}"))
    if where is None:
        return ""  # it reports why, or there is nothing to try
    try:
        socket.create_connection((where[0], where[1]), timeout=seconds).close()
    except OSError as error:
        return (
            f"rank {process.rank} on host {socket.gethostname()} cannot connect to rank {peer} on "
            f"host {host} at {where[0]}, port {where[1]}, where gloo listens: {error}; on host "
            f"{host}, {advice}"
        )
    return ""


def _listen() -> socket.socket | None:
    """Listens where gloo does: on its interface, else at the host name's address, else on loopback.

    Returns None for an interface without an IPv4 address, which is not tested. Raises OSError for
    one that does not exist.
    """
    if names := settings.gloo_interfaces():
        there = [name for _, name in socket.if_nameindex()]
        if missing := [name for name in names if name not in there]:
            raise OSError(f"GLOO_SOCKET_IFNAME names {missing[0]!r}, which does not exist there")
        address = address_of(names[0])
        return socket.create_server((address, 0)) if address else None
    with suppress(OSError):
        for family, *_, place in socket.getaddrinfo(
            socket.gethostname(), None, type=socket.SOCK_STREAM
        ):
            with suppress(OSError):
                return socket.create_server((place[0], 0), family=family)
    return socket.create_server(("127.0.0.1", 0))


def advice() -> str:
    """Returns what to set on this host if other ranks cannot reach it."""
    names = [name for _, name in socket.if_nameindex()]
    found = [f"{name} ({address})" for name in names if (address := address_of(name))]
    by_name = "gloo listens at the address that the host name resolves to: "
    how = "" if settings.gloo_interfaces() else by_name
    return (
        f"{how}set GLOO_SOCKET_IFNAME to an interface that the other ranks can reach "
        f"({', '.join(found)}), and open its ports in the firewall"
    )


def address_of(interface: str) -> str:
    """Returns the IPv4 address of an interface of this host; "" if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, suppress(OSError):
        asked = struct.pack("256s", interface.encode()[:15])
        answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, asked)
        return socket.inet_ntoa(answer[20:24])
    return ""
