"""Messages through shared memory, over c10d, and both in one pipeline."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_ext import GridShape, full_gradients
from axonn_ext.models import ParallelConfig
from axonn_ext.pipeline import Pipeline, PipelineError, PipelineOptions, channels
from grids import grid_of
from limits import HANG_SECONDS
from pipeline_cases import config_of, make, own_batches
from worker_pool import WorkerPool

pytestmark = pytest.mark.long

PAGE = 4096


def bits(shape: GridShape, options: PipelineOptions, unreachable: bool) -> tuple[bytes, int]:
    """The results' bits, and the bytes of shared memory. If `unreachable`, rank 1 cannot open that
    of other ranks.
    """
    model = make(config_of("gpt2", 4), shape, options, ParallelConfig())
    refused = mock.patch.object(channels, "_receivers", lambda addresses: {})
    with refused if unreachable and model.grid.rank == 1 else nullcontext():
        pipeline = Pipeline(model, model.grid, options)
    with pipeline:
        loss = pipeline.step(own_batches(model.grid))
        pipeline.sync_gradients()
        tensors = [loss, *full_gradients(model).values()]
        shared = pipeline.stats.shared_bytes
    return b"".join(t.contiguous().numpy().tobytes() for t in tensors), shared


@pytest.mark.parametrize("shape", [GridShape(pipe=4), GridShape(pipe=2, x=2)], ids=str)
def test_all_ways_give_the_same_bits(pool, shape) -> None:
    shared = pool(4).run(bits, shape, PipelineOptions(), False)
    c10d = pool(4).run(bits, shape, PipelineOptions(transport="c10d"), False)
    mixed = pool(4).run(bits, shape, PipelineOptions(), True)
    assert len({result for found in (shared, c10d, mixed) for result, _ in found}) == 1
    assert all(bytes_ > 0 for _, bytes_ in shared)
    assert all(bytes_ == 0 for _, bytes_ in c10d)
    # Ranks that send only to rank 1 use no shared memory.
    assert {bytes_ > 0 for _, bytes_ in mixed} == {True, False}


class InPlace(nn.Module):
    """Overwrites its input, like ReLU(inplace=True)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(2) if not x.requires_grad else x * 2)


def evaluations(transport: str) -> list[float]:
    grid = grid_of(GridShape(pipe=4))
    layers = []
    for seed in range(4):
        torch.manual_seed(seed)
        layers.append(InPlace())
    inputs = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(0))
    with Pipeline(layers, grid, PipelineOptions(transport=transport), loss=F.mse_loss) as pipeline:
        return [pipeline.evaluate([(x.clone(), x) for x in inputs]).item() for _ in range(3)]


def test_a_stage_may_overwrite_its_input(pool) -> None:
    found = pool(4).run(evaluations, "auto") + pool(4).run(evaluations, "c10d")
    assert len({loss for losses in found for loss in losses}) == 1


def memory(steps: int) -> list[int]:
    grid = grid_of(GridShape(pipe=2))
    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    inputs = torch.randn(8, 2 * PAGE // 32, 8)  # messages of two pages
    with Pipeline(layers, grid, loss=F.mse_loss) as pipeline:
        found = []
        for _ in range(steps):
            pipeline.step([(x, x) for x in inputs])
            found.append(pipeline.stats.shared_bytes)
    return found


def test_memory_of_messages_is_used_again(pool) -> None:
    first, second = pool(2).run(memory, 12)
    # The first stage has at most 4 micro-batches in flight; messages of micro-batches that have
    # returned may be freed a little later. A form takes a page.
    assert first[-1] <= (4 + 2) * 2 * PAGE + PAGE
    assert second[-1] <= (4 + 2) * 2 * PAGE + PAGE


def num_threads() -> int:
    return sum(thread.name == "axonn pipeline" for thread in threading.enumerate())


def num_segments() -> int:
    return Path("/proc/self/maps").read_text().count("axonn:messages")


def two_layers() -> Pipeline:
    grid = grid_of(GridShape(pipe=2))
    return Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], grid, loss=F.mse_loss)


def threads_after(case: str) -> tuple[int, int]:
    """The numbers of threads and segments left after a pipeline ended in this way."""
    pipeline = two_layers()
    x, bad = torch.ones(1, 4), torch.ones(1, 3)  # no loss has these shapes
    if case == "dropped":
        pipeline.step([(x, x)])
    else:
        with pytest.raises((RuntimeError, KeyError)), pipeline:
            pipeline.step([(x, bad if case == "step" else x)])
            raise KeyError("the user's own")
    del pipeline
    gc.collect()
    return num_threads(), num_segments()


@pytest.mark.parametrize("case", ["dropped", "step", "own"])
def test_no_thread_and_no_memory_is_left(pool, case) -> None:
    assert pool(2).run(threads_after, case) == [(0, 0)] * 2


FAILS = """
import torch, torch.distributed as dist
import axonn_ext
from axonn_ext.pipeline import Pipeline
dist.init_process_group("gloo")
pipeline = Pipeline([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)], axonn_ext.Grid(pipe=2),
                    loss=torch.nn.functional.mse_loss)
pipeline.step([(torch.ones(1, 4), torch.ones(1, 4))])
if {caught}:
    try:
        with pipeline:
            pipeline.step([(torch.ones(1, 4), torch.ones(1, 3))])
    except RuntimeError:
        pass
else:
    pipeline.step([(torch.ones(1, 4), torch.ones(1, 3))])
"""


@pytest.mark.parametrize("caught", [True, False])
def test_a_process_ends_cleanly_after_a_failure(tmp_path, caught) -> None:
    """A message thread that wakes up while the interpreter exits would abort the process."""
    script = tmp_path / "fails.py"
    script.write_text(FAILS.format(caught=caught))
    codes = []
    for attempt in range(2):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
        ranks = [
            subprocess.Popen(
                [sys.executable, script], stderr=subprocess.PIPE, text=True,
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port,
                     "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"},
            )
            for rank in range(2)
        ]  # fmt: skip
        errors = [rank.communicate(timeout=HANG_SECONDS)[1] for rank in ranks]
        assert not any("terminate called" in text for text in errors), errors[attempt]
        codes += [rank.returncode for rank in ranks]
    assert codes == [0 if caught else 1] * 4


def forgets_alone() -> str:
    grid = grid_of(GridShape(pipe=2))
    x = torch.ones(5, 4)  # the same number of bytes as a form's description
    with pytest.raises(PipelineError) as error, two_layers() as pipeline:
        pipeline.step([(x, x)])
        if grid.rank == 0:
            pipeline.forget_shapes()
        pipeline.step([(x, x)])
    return str(error.value)


def test_all_ranks_must_forget_shapes(pool) -> None:
    for text in pool(2).run(forgets_alone):
        assert "all ranks must have the same number of calls of forget_shapes" in text


def finds_no_room() -> str:
    x = torch.ones(2 << 20, 1)
    layers = [nn.Linear(1, 1), nn.Linear(1, 1)]
    with pytest.raises(PipelineError) as error:
        with Pipeline(layers, grid_of(GridShape(pipe=2)), loss=F.mse_loss) as pipeline:
            pipeline.step([(x, x)])
    return str(error.value)


def test_a_message_without_room_is_named(monkeypatch) -> None:
    monkeypatch.setenv("AXONN_SYMMETRIC_MEMORY_BYTES", str(1 << 20))
    pool = WorkerPool(2)
    for text in pool.run(finds_no_room):
        assert "a message of 8388608 bytes finds no room" in text
        assert "AXONN_SYMMETRIC_MEMORY_BYTES" in text
    pool.close()
