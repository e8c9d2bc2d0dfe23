"""How the ranks of a job meet, and their errors if they cannot."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from axonn_ext.cli import main
from axonn_ext.ranks.launch import process
from axonn_ext.ranks.launch.place import Process
from axonn_ext.terminal.errors import MeetingError, TrainingError
from commands import small


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port on which two ranks are to meet, but which another program uses."""
    monkeypatch.setenv("AXONN_TIMEOUT_SECONDS", "1")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        number = int(other.getsockname()[1])
        launched = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": number}
        for name, value in launched.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        yield number


def test_a_port_in_use_is_a_line_of_the_command(
    port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--grid", "x=2", *small()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("[rank 0] error: cannot meet the other ranks: ")
    assert str(port) in error and error.count("\n") == 1


def test_an_address_that_does_not_resolve(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "nosuch.invalid")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(MeetingError, match=r"the other ranks: .*nosuch\.invalid") as error:
        process.open_store(Process(1, 2, 2))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("wait", "rank"),
    [
        (lambda store: process.meet(store, Process(0, 3, 3)), "ranks 1, 2"),
        (
            lambda store: process.settled_by_rank_0(store, Process(1, 2, 2), str, topic="grid"),
            "rank 0",
        ),
    ],
)
def test_a_rank_that_never_comes(
    wait: Callable[[PrefixStore], object], rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AXONN_TIMEOUT_SECONDS", "0.3")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    expected = rf"no word of {rank} after 0.3 s \(AXONN_TIMEOUT_SECONDS\)"
    with pytest.raises(MeetingError, match=expected):
        wait(PrefixStore("job", store))


def test_a_store_that_goes_is_no_mistake_of_the_user() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(minutes=5))
    del server
    with pytest.raises(TrainingError, match="lost the other ranks: "):
        process.meet(client, Process(1, 2, 2))


@pytest.mark.parametrize("ranks", [1, 3, 1000])
def test_threads_are_a_share_of_the_host_s_cores(ranks: int) -> None:
    """Cores are shared by this host's ranks, not all ranks; an explicit number takes precedence."""
    cores, before = len(os.sched_getaffinity(0)), torch.get_num_threads()
    try:
        here = Process(rank=0, world_size=4000 * ranks, local_world_size=ranks)
        assert process.set_threads(here, 0) == torch.get_num_threads() == max(1, cores // ranks)
        assert process.set_threads(here, 5) == torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(before)
