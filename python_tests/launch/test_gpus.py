"""The GPU of each rank, and ranks that share one, for each launcher. GPUs are UUIDs here."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store

from axonn_ext.ranks.launch.gpus import gpu_index, shares_gpus
from axonn_ext.ranks.launch.place import Process
from axonn_ext.spec.settings import launch_environment, let_ranks_share_gpus
from axonn_ext.terminal.errors import MeetingError

HOSTS, GPUS = 2, 4
GPUS_OF = {host: [f"GPU-{host}-{i}" for i in range(GPUS)] for host in range(HOSTS)}
Variables = Callable[[int, int, int], dict[str, str]]  # (host, local rank, ranks per host)


class Counted(Store):
    """A rank's connection to the store, which counts its calls."""

    def __init__(self, served: HashStore) -> None:
        super().__init__()
        self._served, self.count = served, 0

    def set(self, key: str, value: bytes) -> None:
        self.count += 1
        self._served.set(key, value.decode())

    def get(self, key: str) -> bytes:
        self.count += 1
        return self._served.get(key)

    def add(self, key: str, amount: int) -> int:
        self.count += 1
        return self._served.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        self.count += 1
        return self._served.check(keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.count += 1
        self._served.wait(keys, timeout)


def torchrun(host: int, local: int, here: int) -> dict[str, str]:
    return {
        "RANK": str(host * here + local), "WORLD_SIZE": str(HOSTS * here),
        "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(here),
    }  # fmt: skip


def srun(host: int, local: int, here: int) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(host * here + local), "SLURM_LOCALID": str(local),
        "SLURM_NTASKS": str(HOSTS * here), "SLURM_NODEID": str(host), "SLURM_JOB_ID": "4711",
        "SLURM_STEP_NODELIST": "gpu[08-09]", "SLURM_STEP_TASKS_PER_NODE": f"{here}(x{HOSTS})",
    }  # fmt: skip


def by_hand_in_srun(host: int, local: int, here: int) -> dict[str, str]:
    """Variables that scripts copy from Slurm's, without LOCAL_WORLD_SIZE."""
    set_by_user = torchrun(host, local, here)
    del set_by_user["LOCAL_WORLD_SIZE"]
    return srun(host, local, here) | set_by_user


def all_gpus(host: int, local: int) -> list[str]:
    return GPUS_OF[host]


def own_gpu(host: int, local: int) -> list[str]:
    return [GPUS_OF[host][local]]


def first_gpu(host: int, local: int) -> list[str]:
    return GPUS_OF[host][:1]


@pytest.mark.parametrize(
    ("variables", "visible", "here", "indices", "shared"),
    [
        (torchrun, all_gpus, 4, [0, 1, 2, 3], False),
        (srun, all_gpus, 4, [0, 1, 2, 3], False),
        (srun, own_gpu, 4, [0, 0, 0, 0], False),  # --gpus-per-task=1
        (by_hand_in_srun, own_gpu, 4, [0, 0, 0, 0], False),
        (by_hand_in_srun, all_gpus, 4, [0, 1, 2, 3], False),
        (torchrun, first_gpu, 1, [0], False),  # one visible GPU
        (torchrun, first_gpu, 2, [0, 0], True),
        (srun, first_gpu, 2, [0, 0], True),
        (torchrun, all_gpus, 6, [0, 1, 2, 3, 0, 1], True),
    ],
)
def test_gpus_by_launcher(
    variables: Variables,
    visible: Callable[[int, int], list[str]],
    here: int,
    indices: list[int],
    shared: bool,
) -> None:
    server = HashStore()

    def rank(number: int) -> tuple[int, dict[str, str], int]:
        host, local = divmod(number, here)
        launch = launch_environment(variables(host, local, here))
        assert launch is not None
        process, store = Process.of(launch), Counted(server)
        uuids, changed = visible(host, local), dict[str, str]()
        index = gpu_index(process, len(uuids))
        if shares_gpus(store, process, uuids[index]):
            let_ranks_share_gpus(process.rank, changed)
        return index, changed, store.count

    with ThreadPoolExecutor(HOSTS * here) as ranks:
        found = list(ranks.map(rank, range(HOSTS * here)))
    assert [index for index, _, _ in found] == indices * HOSTS
    for number, (_, changed, _) in enumerate(found):
        assert changed.get("NCCL_HOSTID") == (f"axonn-ext-rank-{number}" if shared else None)
        assert bool(changed) == shared
    assert max(count for _, _, count in found) <= 7, "whatever the number of ranks"


def test_a_rank_of_the_host_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AXONN_TIMEOUT_SECONDS", "0.2")
    with pytest.raises(MeetingError, match=r"of the 4 ranks of its host, 1 came within 0\.2 s"):
        shares_gpus(HashStore(), Process(2, 8, 4), "GPU-0-2")
