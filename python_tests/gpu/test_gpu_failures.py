"""Failures that only the GPU in software can simulate: out of memory at each allocation of a
training step, a GPU that dies, an error of NCCL, a rank that is killed. They are reported, nothing
hangs, and nothing is left over.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from axonn_ext import GridShape, models
from axonn_ext.ops import matmul_reduce_scatter
from axonn_ext.optim import AdamW
from commands import AXONN, processes_with, run, small
from gpu_in_software import (
    GONE,
    NCCL_REMOTE_ERROR,
    NCCL_SYSTEM_ERROR,
    OUT_OF_MEMORY,
    calls_of,
    fail,
    only_in_software,
)
from grids import grid_of
from limits import HANG_SECONDS
from model_cases import GPT2, random_batch
from test_gpu_communicators import connected
from worker_pool import WorkerError, WorkerPool

pytestmark = [pytest.mark.gpu, only_in_software]


# --- Out of memory -------------------------------------------------------------------------------


class Step:
    """A training step of a small GPT-2 that can be repeated from the same state."""

    def __init__(self) -> None:
        grid = grid_of(GridShape())
        self.model = models.build(GPT2, grid, models.ParallelConfig()).to("cuda")
        self.optimizer = AdamW(self.model, lr=1e-2)
        self.ids, self.labels = (t.to("cuda") for t in random_batch())
        self.whole()
        self.start = [p.detach().cpu() for p in self.model.parameters()]

    def gradients(self) -> float:
        self.optimizer.zero_grad()
        loss = self.model.loss(self.ids, self.labels, 64.0)
        loss.backward()
        return loss.item()

    def all_gradients(self) -> list[torch.Tensor]:
        return [p.grad.cpu() for p in self.model.parameters() if p.grad is not None]

    def whole(self) -> None:
        self.gradients()
        self.optimizer.step()

    def rewind(self) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), self.start, strict=True):
                parameter.copy_(value)

    def is_at_start(self) -> bool:
        pairs = zip(self.model.parameters(), self.start, strict=True)
        return all(torch.equal(parameter.detach().cpu(), value) for parameter, value in pairs)


def allocations_of(body: Callable[[], object]) -> int:
    before = calls_of("cudaMalloc")
    body()
    return calls_of("cudaMalloc") - before


def error_of(body: Callable[[], object]) -> str:
    try:
        body()
    except RuntimeError as error:
        return str(error)
    return "no error"


def fail_at_each_allocation() -> tuple[int, list[str]]:
    """The number of allocations in a step, and the problems when each of them failed in turn."""
    step, wrong = Step(), []
    want = step.gradients(), step.all_gradients()
    of_gradients, count = allocations_of(step.gradients), allocations_of(step.whole)
    for n in range(count):
        step.rewind()
        step.optimizer.zero_grad()
        fail("cudaMalloc", OUT_OF_MEMORY, skipped=n)
        heard = error_of(step.whole)
        if "cudaErrorMemoryAllocation" not in heard:
            wrong.append(f"allocation {n}: {heard}")
        if n < of_gradients and not step.is_at_start():
            wrong.append(f"allocation {n}: parameters changed")
        step.rewind()
        again = step.gradients(), step.all_gradients()
        if again[0] != want[0] or not all(map(torch.equal, again[1], want[1])):
            wrong.append(f"allocation {n}: the next step has another loss or other gradients")
        if (heard := error_of(step.optimizer.step)) != "no error" or step.is_at_start():
            wrong.append(f"allocation {n}: the next step changes nothing: {heard}")
        if not all(p.isfinite().all() for p in step.model.parameters()):
            wrong.append(f"allocation {n}: the next step makes parameters that are not finite")
    return count, wrong


@pytest.fixture
def rank_that_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPool]:
    """A rank where PyTorch allocates each tensor with CUDA, and frees its memory at once."""
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    pool = WorkerPool(1, device="cuda")
    yield pool
    pool.close()


def test_each_allocation_of_a_step(rank_that_keeps_no_memory: WorkerPool) -> None:
    [(count, wrong)] = rank_that_keeps_no_memory.run(fail_at_each_allocation)
    assert count > 100
    assert not wrong, "\n".join(wrong)


# --- Jobs ----------------------------------------------------------------------------------------


def run_job(monkeypatch: pytest.MonkeyPatch, folder: Path, failure: str) -> tuple[int, str]:
    """The status and output of a job of two ranks; rank 1 has this failure."""
    monkeypatch.setenv("GPU_MACHINE_FAIL", f"1:{failure}")
    monkeypatch.setenv("AXONN_TIMEOUT_SECONDS", "30")
    command = [*AXONN, "train", "--grid", "x=2", "--out", str(folder)]
    options = small(**{"train.device": "cuda", "parallel.algorithm": "sequential"})
    done = run([*command, *options])
    assert not processes_with(str(folder)), done.output
    return done.status, done.output


@pytest.mark.parametrize("skipped", [0, 40, 400])
def test_a_job_whose_rank_is_out_of_memory(monkeypatch, tmp_path, skipped: int) -> None:
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    status, output = run_job(monkeypatch, tmp_path / "run", f"cudaMalloc:{OUT_OF_MEMORY}:{skipped}")
    assert status != 0
    assert re.search(r"\[rank 1\].*cudaErrorMemoryAllocation", output), output
    assert "error: rank 1 (pid " in output, output


def test_a_job_whose_gpu_dies(monkeypatch, tmp_path) -> None:
    status, output = run_job(monkeypatch, tmp_path / "run", f"cudaEventRecord:{GONE}:100")
    assert status != 0
    assert "cudaEventRecord: the GPU is gone" in output, output
    assert "error: rank 1 (pid " in output, output


@pytest.mark.parametrize("skipped", [0, 10])
def test_a_job_with_an_error_of_nccl(monkeypatch, tmp_path, skipped: int) -> None:
    status, output = run_job(
        monkeypatch, tmp_path / "run", f"ncclAllReduce:{NCCL_REMOTE_ERROR}:{skipped}"
    )
    assert status != 0
    assert re.search(r"\[rank 1\].*NCCL error.*remote process exited", output), output


# --- Ranks of which one fails ------------------------------------------------------------------


def end_at_once() -> str:
    """Rank 1's call fails, and it closes its communicators; returns each rank's error."""
    try:
        with connected(GridShape(x=2), AXONN_TIMEOUT_SECONDS="20") as grid:
            own, end = torch.ones(4, device="cuda"), time.monotonic() + HANG_SECONDS
            if dist.get_rank() == 1:
                fail("ncclAllReduce", NCCL_SYSTEM_ERROR)
            grid.axis("x").all_reduce(own, own)
            while time.monotonic() < end:
                grid.check()
                time.sleep(0.1)
    except RuntimeError as error:  # from the call, from `check`, or from closing
        return str(error)
    return "nothing"


def test_a_rank_that_fails_and_ends_tells_why(gpu_pool) -> None:
    heard, own = gpu_pool(2).run(end_at_once)
    assert "axis x: all_reduce float32[4] failed" in own
    assert "rank 1 reports: axis x: all_reduce float32[4] failed" in heard


def fused_calls_without_end(folder: Path) -> None:
    """Runs fused calls one after the other; rank 1 is killed during one of them."""
    (folder / str(os.getpid())).touch()
    a = torch.ones(256, 128, device="cuda", dtype=torch.bfloat16)
    b = torch.ones(128, 128, device="cuda", dtype=torch.bfloat16)
    for count in itertools.count():
        if count == 3 and dist.get_rank() == 1:
            assert mapped_memory(os.getpid())  # it must not remain
            signal.setitimer(signal.ITIMER_REAL, 0.3)  # no handler: the process ends
        try:
            matmul_reduce_scatter(a, b, dist.group.WORLD, algorithm="fused")
            torch.cuda.synchronize()
        except RuntimeError:
            time.sleep(1.0)  # a thread checks ten times per second for a name to report
            raise


def mapped_memory(pid: int) -> set[str]:
    """The inodes of the GPUs' symmetric memory that the process maps."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memory of a GPU in software" in line}


def test_a_rank_that_is_killed_in_a_fused_call(monkeypatch, capfd, tmp_path) -> None:
    monkeypatch.setenv("AXONN_TIMEOUT_SECONDS", "5")
    pool = WorkerPool(2, device="cuda")
    try:
        with pytest.raises(WorkerError) as found:
            pool.run(fused_calls_without_end, tmp_path)
    finally:
        pool.close()
    assert "rank 1: the process ended" in str(found.value)
    assert "CUDA error" in str(found.value)  # of rank 0
    assert "fused op of rank 0 in group '0' waited in vain for rank 1" in capfd.readouterr().err
    # Their memory has no name, so it is freed with the last process that maps it.
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)
