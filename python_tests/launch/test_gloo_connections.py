"""The number of ranks that gloo connects, and how ranks notice that another one has ended."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from axonn_ext.ranks import meeting
from commands import ROOT, environment
from limits import HANG_SECONDS


def said_by_ranks(size: int) -> list[dict[str, Any]]:
    command = [sys.executable, str(ROOT / "python_tests/support/gloo_ranks.py"), str(size)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=HANG_SECONDS
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(said["rank"] for said in lines) == list(range(size)), done.stderr
    return lines


@pytest.mark.long
@pytest.mark.parametrize(("size", "of_world", "of_data"), [(8, 5, 3), (16, 7, 5)])
def test_sockets_of_a_rank(size: int, of_world: int, of_data: int) -> None:
    """A rank's peers are those 1, 2, 4, ... away, and all ranks notice the end of one at once."""
    for said in said_by_ranks(size):
        assert said["world"] == 1 + of_world, "a listener, and the connections"
        assert said["grid"] == 1 + (1 + 1) + (1 + of_data), "the groups of one rank, x and data"
        ended = said["rank"] == size - 1
        assert ("error" in said) != ended and (ended or "by peer" in said["error"]), said


def left_alone(lazy: str, device: str) -> str:
    """The error of `connect` on rank 0 if rank 1 does not call it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_GLOO_LAZY_INIT", lazy)
        group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
        if dist.get_rank() == 1:
            return ""
        patch.setenv("AXONN_TIMEOUT_SECONDS", "0.3")
        with pytest.raises(RuntimeError) as error, torch.device(device):
            meeting.connect(group)
    return str(error.value)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("lazy", ["0", "1"], ids=["connected", "connected on demand"])
def test_a_rank_that_does_not_connect(pool, lazy: str, device: str) -> None:
    said, _ = pool(2).run(left_alone, lazy, device)
    start = "ranks 0, 1 did not all connect within 0.3 s (AXONN_TIMEOUT_SECONDS): "
    assert said.startswith(start), said
