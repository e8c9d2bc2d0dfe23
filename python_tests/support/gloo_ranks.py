"""Forks the given number of ranks; each prints its numbers of sockets as a line of JSON.

The ranks make a process group as `axonn-ext` does, and a Grid with x=2. Then the last rank ends,
and the others call an all-reduce.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback

import torch
import torch.distributed as dist

from axonn_ext.ranks.grid import Grid
from axonn_ext.ranks.launch.place import Process
from axonn_ext.ranks.launch.process import process_group


def num_sockets() -> int:
    """The number of open sockets of this process."""
    fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(fd) and os.readlink(fd).startswith("socket:") for fd in fds)


def start(rank: int, size: int, store_file: str) -> dict[str, object]:
    """A rank's report: the number of sockets for its world and its grid, and any error."""
    said: dict[str, object] = {"rank": rank}
    store, before = dist.FileStore(store_file, size), num_sockets()
    try:
        with process_group(Process(rank, size, size), store):
            said["world"] = num_sockets() - before
            grid = Grid(x=2, data=size // 2)
            said["grid"] = num_sockets() - before - said["world"]
            if store.add("counted", 1) == size:
                store.set("all counted", "")
            store.wait(["all counted"])
            if rank < size - 1:
                dist.all_reduce(torch.ones(1))
            del grid
    except RuntimeError as error:
        said["error"] = str(error)
    return said


def main(size: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(size):
            if (pid := os.fork()) == 0:
                try:
                    said = start(rank, size, f"{folder}/store")
                    os.write(1, f"{json.dumps(said)}\n".encode())
                except BaseException:
                    traceback.print_exc()
                os._exit(0)
            pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
