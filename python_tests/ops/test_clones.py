"""Ranks on hosts that look like one: clones of a virtual machine, with equal process numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from axonn_ext import _C
from commands import environment
from limits import HANG_SECONDS

RANK = """
import sys
import torch
import torch.distributed as dist
from axonn_ext import ops

class OfClones(dist.Store):
    '''Where addresses of peers have the process and the descriptor of this rank.'''

    def __init__(self, store, rank):
        super().__init__()
        self.store, self.own, self.here = store, f"/address/{rank}", []

    def set(self, key, value):
        if key.endswith(self.own):
            self.here = value.split()[:2]
        self.store.set(key, value)

    def get(self, key):
        value = self.store.get(key)
        if "/address/" in key:
            value = b" ".join(self.here + value.split(b" ")[2:])
        return value

    def add(self, key, amount):
        return self.store.add(key, amount)

    def check(self, keys):
        return self.store.check(keys)

    def wait(self, *arguments):
        return self.store.wait(*arguments)

    def compare_set(self, key, expected, wanted):
        return self.store.compare_set(key, expected, wanted)

    def delete_key(self, key):
        return self.store.delete_key(key)

    def set_timeout(self, timeout):
        self.store.set_timeout(timeout)

rank, file = int(sys.argv[1]), sys.argv[2]
store = OfClones(dist.FileStore(file), rank)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
a = torch.full((2, 2), 1.0 + rank)
print(ops.matmul_all_reduce(a, torch.ones(2, 2), dist.group.WORLD).tolist())
"""


def test_a_product_of_ranks_on_clones_is_that_of_both(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")], env=environment(),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for rank in ranks:
            output, errors = rank.communicate(timeout=HANG_SECONDS)
            assert output == "[[6.0, 6.0], [6.0, 6.0]]\n", errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_a_channel_of_a_clone_is_not_opened() -> None:
    own, other = (_C.MessageSender(name="test", address_space=1 << 16) for _ in range(2))
    pid, fd, *_ = own.address.split(" ")
    _, _, *rest = other.address.split(" ")
    _C.MessageReceiver(address=own.address)
    with pytest.raises(RuntimeError, match="is other memory than the peer's"):
        _C.MessageReceiver(address=" ".join([pid, fd, *rest]))
