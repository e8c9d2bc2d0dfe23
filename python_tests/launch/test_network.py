"""Ranks that cannot connect to each other are named before gloo tries to connect."""

from __future__ import annotations

import json
import re
import socket
import threading

import pytest
from torch.distributed import HashStore

from axonn_ext.ranks.launch.network import address_of, check_connections
from axonn_ext.ranks.launch.place import Process
from axonn_ext.terminal.errors import MeetingError
from limits import HANG_SECONDS


def errors_of(size: int) -> list[str]:
    """The errors of the ranks of a job in this process; "" if they can connect."""
    store, errors = HashStore(), [""] * size

    def check(rank: int) -> None:
        try:
            check_connections(store, Process(rank, size, size))
        except MeetingError as error:
            errors[rank] = str(error)

    ranks = [threading.Thread(target=check, args=(rank,)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(HANG_SECONDS)
    return errors


@pytest.mark.parametrize("interface", ["", "lo", "lo,lo"])
def test_ranks_that_can_connect(interface: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    assert errors_of(3) == [""] * 3


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    first, second = errors_of(2)
    assert first == second
    host = re.escape(socket.gethostname())
    assert re.search(
        rf"gloo of rank [01] cannot listen on host {host}: GLOO_SOCKET_IFNAME names 'nosuch0', "
        r"which does not exist there; .*set GLOO_SOCKET_IFNAME to .*lo \(127\.0\.0\.1\)",
        first,
    )


def test_an_address_that_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, a host's name may resolve to its own loopback address."""
    monkeypatch.setenv("AXONN_TIMEOUT_SECONDS", str(HANG_SECONDS))
    store = HashStore()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        where = ["127.0.0.1", unused.getsockname()[1]]
        store.set("network/1", json.dumps([where, "other", "set GLOO_SOCKET_IFNAME to eth1"]))
        store.add("network/done", 1)
        with pytest.raises(MeetingError) as error:
            check_connections(store, Process(0, 2, 1))
    assert re.search(
        rf"rank 0 on host .* cannot connect to rank 1 on host other at 127\.0\.0\.1, "
        rf"port {where[1]}, where gloo listens: .*refused; on host other, set GLOO",
        str(error.value),
    )


def test_a_rank_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AXONN_TIMEOUT_SECONDS", "0.3")
    with pytest.raises(MeetingError, match=r"no word of rank 1 after 0\.3 s"):
        check_connections(HashStore(), Process(0, 2, 2))


def test_the_address_of_an_interface() -> None:
    assert address_of("lo") == "127.0.0.1" and address_of("nosuch0") == ""
