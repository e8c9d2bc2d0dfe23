"""Orders hosts by rank so that neighbours along an axis are neighbours in the network.

torchrun sorts hosts as text: gpu1, gpu10, gpu2. Rank 0 serves the store and stays rank 0. So the
other hosts follow its host in the requested order, as on a ring.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store

from axonn_ext.ranks.launch.place import Process
from axonn_ext.ranks.launch.process import settled_by_rank_0
from axonn_ext.ranks.stores import comes
from axonn_ext.spec import settings
from axonn_ext.spec.files.errors import clipped
from axonn_ext.spec.files.files import FileError, read_text
from axonn_ext.terminal.errors import MeetingError, UserError

NATURAL = "natural"  # gpu1, gpu2, gpu10
Place = tuple[tuple[str, ...], int]  # parts of the network, largest first; and a number


def in_rank_order(store: Store, process: Process, rank_order: str, *, host: str) -> Process:
    """Returns the place of this process after hosts are ordered. All ranks call it.

    rank_order: NATURAL, or a file that `read_order` reads on rank 0. host: the name of this host.

    Raises: UserError if rank 0 cannot read the file, or it lacks a host.
    """
    here = process.local_world_size
    if process.is_first_of_host:
        store.set(f"host/{process.rank // here}", host)

    def settle() -> str:
        hosts = _hosts(store, process.world_size // here)
        places = _natural(hosts) if rank_order == NATURAL else read_order(Path(rank_order), hosts)
        return json.dumps(order_of(places))

    order = json.loads(settled_by_rank_0(store, process, settle, topic="rank order"))
    number, local = divmod(process.rank, here)
    return dataclasses.replace(process, rank=order.index(number) * here + local)


def order_of(places: Sequence[Place]) -> list[int]:
    """Returns the indices of the hosts in their new order, which begins with host 0.

    Hosts of one part of the network stay together. Host 0 comes first within its part; the others
    follow by number, starting from its number and wrapping around.
    """
    parts_of_0, number_of_0 = places[0]
    most = 1 + max(number for _, number in places)

    def key(host: int) -> tuple[object, ...]:
        parts, number = places[host]
        levels = [
            (parts[:depth] != parts_of_0[:depth], [natural(part) for part in parts[:depth]])
            for depth in range(1, len(parts) + 1)
        ]
        return (levels, (number - number_of_0) % most)

    return sorted(range(len(places)), key=key)


def read_order(path: Path, hosts: Sequence[str]) -> list[Place]:
    """Returns the place of each host from a file that has a line for each.

    A line is a host's name, optionally followed by its part of the network, like `spine1/leaf7` or
    an NVLink domain. Hosts of one part are neighbours; within a part, and without parts, the order
    is that of the lines. `#` begins a comment.

    Raises: UserError, with the line, for a line of another form, or a host that has no line.
    """
    places: dict[str, Place] = {}
    try:
        text = read_text(path)
    except FileError as error:
        raise UserError(f"--rank-order {error}") from None
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) > 2 or words[0] in places:
            what = "a host not yet listed" if len(words) < 3 else "HOST or HOST PART/PART"
            raise UserError(f"--rank-order {path}:{number}: expected {what}, got {clipped(line)!r}")
        places[words[0]] = (tuple(words[1].split("/")) if words[1:] else (), number)
    depths = {len(parts) for parts, _ in places.values()}
    if len(depths) > 1:
        raise UserError(
            f"--rank-order {path}: expected as many parts for each host, got "
            f"{' and '.join(map(str, sorted(depths)))}"
        )
    return [_place_of(host, places, path) for host in hosts]


def natural(text: str) -> list[tuple[bool, int, str]]:
    """Returns a sort key in which numbers inside a name count as numbers."""
    return [(not n, int(n or 0), s) for n, s in re.findall(r"(\d+)|(\D+)", text)]


def _place_of(host: str, places: dict[str, Place], path: Path) -> Place:
    """Returns the place of a host by its name, with or without its domain."""
    found = places.get(host, places.get(host.partition(".")[0]))
    if found is None:
        raise UserError(f"--rank-order {path}: expected a line for each host, got none for {host}")
    return found


def _natural(hosts: Sequence[str]) -> list[Place]:
    ordered = sorted(set(hosts), key=natural)
    return [((), ordered.index(host)) for host in hosts]


def _hosts(store: Store, count: int) -> list[str]:
    keys = [f"host/{number}" for number in range(count)]
    seconds = settings.load().timeout_seconds
    if not comes(store, keys, timedelta(seconds=seconds)):
        raise MeetingError(f"--rank-order: not all {count} hosts gave their name in {seconds:g} s")
    return [store.get(key).decode() for key in keys]
