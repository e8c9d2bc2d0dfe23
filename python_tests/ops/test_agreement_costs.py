"""Ranks without shared memory agree on a call with as many questions to the store in any group."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from commands import environment
from limits import HANG_SECONDS

pytestmark = pytest.mark.long

# Starts as many ranks as it is told. Each prints how often it asked the store in each of its calls.
RANKS = """
import collections, json, os, resource, sys, tempfile
from pathlib import Path
import torch
import torch.distributed as dist
from axonn_ext.kernels import extension  # registers the ops
ops = torch.ops.axonn
torch.set_num_threads(1)

class Counting(dist.Store):
    def __init__(self, store):
        super().__init__()
        self.store, self.counts = store, collections.Counter()

    def set(self, key, value): self.count("set"); self.store.set(key, value)
    def get(self, key): self.count("get"); return self.store.get(key)
    def add(self, key, amount): self.count("add"); return self.store.add(key, amount)
    def wait(self, *arguments): return self.store.wait(*arguments)
    def deleteKey(self, key): self.count("delete"); return self.store.delete_key(key)
    def set_timeout(self, timeout): self.store.set_timeout(timeout)

    def check(self, keys):
        found = self.store.check(keys)
        if found:  # the others are polls while it waits
            self.count("check")
        return found

    def compare_set(self, key, expected, wanted):
        self.count("compare_set")
        return self.store.compare_set(key, expected, wanted)

    def count(self, what): self.counts[what] += 1

size, file = int(sys.argv[1]), tempfile.mktemp()
rank = next((n for n in range(1, size) if os.fork() == 0), 0)
counting = Counting(dist.FileStore(file))
dist.init_process_group("gloo", store=counting, rank=rank, world_size=size)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 36), resource.RLIM_INFINITY))
name, found = dist.group.WORLD.group_name, []
for width in (2, 3, 5, 3):
    before = counting.counts.copy()
    total = ops.all_reduce(torch.full((width,), 1.0 + rank), "sum", name, size, "sequential")
    assert total.tolist() == [size * (size + 1) / 2] * width
    found.append(sum((counting.counts - before).values()))
os.write(1, (json.dumps(found) + "\\n").encode())
dist.barrier()
if rank == 0:
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    os.unlink(file)
os._exit(0)
"""


def counted(size: int) -> list[list[int]]:
    ran = subprocess.run(
        [sys.executable, "-c", RANKS, str(size)],
        env=environment() | {"AXONN_SYMMETRIC_MEMORY_BYTES": str(1 << 38)}, check=True,
        capture_output=True, text=True, timeout=HANG_SECONDS,
    )  # fmt: skip
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_a_rank_asks_the_store_as_often_in_a_group_of_any_size() -> None:
    few, many = counted(2), counted(9)
    assert len(few) == 2 and len(many) == 9
    for _, second, third, known in (*few, *many):  # the first call also meets
        # set, compare_set, add, check, get, delete; the last rank also answers and forgets
        assert {second, third} <= {6, 10}
        assert known == 0
    assert all(sum(row[place] > 6 for row in many) <= 1 for place in (1, 2))
