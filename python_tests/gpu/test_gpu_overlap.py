"""Overlap on GPUs, over NCCL: the same bits with and without, memory, errors, times, graphs."""

from __future__ import annotations

import dataclasses
import gc
import os
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from axonn_ext import Grid, GridShape
from axonn_ext.kernels import extension
from axonn_ext.models import ParallelConfig
from axonn_ext.nn import Linear
from axonn_ext.overlap import Orchestrator, Overlap
from axonn_ext.overlap.transport import C10dTransport, NcclTransport
from axonn_ext.train.exposure import Exposure
from grids import grid_of, relative_error
from limits import HANG_SECONDS
from model_cases import GPT2, LLAMA
from overlap_cases import LIMITS, Case, compare, diverge_on

pytestmark = pytest.mark.gpu

CASES = {
    "gpt2": Case(GPT2, ParallelConfig(recompute="full", algorithm="sequential"), micro_batches=2),
    "llama": Case(LLAMA, ParallelConfig(algorithm="sequential"), dtype=torch.float64),
    "bf16": Case(LLAMA, ParallelConfig(algorithm="sequential"), dtype=torch.bfloat16),
}


OURS_OR_C10D = [
    "c10d",
    pytest.param(
        "own", marks=pytest.mark.skipif(extension.cuda is None, reason="no CUDA parts are built")
    ),
]


@pytest.mark.parametrize("communicators", OURS_OR_C10D)
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("shape", [GridShape(z=2), GridShape(z=2, data=2), GridShape(x=2, z=2)])
def test_the_same_bits_on_and_off(gpu_pool, case, shape, communicators):
    on_gpu = dataclasses.replace(CASES[case], device="cuda", communicators=communicators)
    for differing, error in gpu_pool(shape.size).run(compare, shape, on_gpu):
        assert differing == []
        assert error < LIMITS[on_gpu.dtype]


def transports_used() -> list[type]:
    """The transports of three runs: by default, with a limit of SMs, on c10d's groups."""
    model = stack(grid_of(GridShape(z=2)), 64, 1)
    used = []
    for overlap in (Overlap(), Overlap(max_ctas=2), Overlap(communicators="c10d")):
        with Orchestrator(model, overlap) as run:
            model(torch.ones(8, 64, device="cuda")).sum().backward()
            run.sync_gradients()
            used += [type(lane._transport) for lane in run._lanes.values()]
    return used


@pytest.mark.skipif(extension.cuda is None, reason="no CUDA parts are built")
def test_communicators_of_our_own_are_the_default(gpu_pool):
    assert gpu_pool(2).run(transports_used) == [[NcclTransport, NcclTransport, C10dTransport]] * 2


def drop_collectives(communicators: str) -> list[bool]:
    """Whether the memory of a collective without a wait is reused only after it has ended."""
    model = stack(grid_of(GridShape(z=2)), 64, 1)
    right = []
    with Orchestrator(model, Overlap(communicators=communicators)) as run:
        model(torch.ones(8, 64, device="cuda")).sum().backward()
        run.sync_gradients()
        for _ in range(5):
            data = torch.ones(1 << 20, device="cuda")
            run._lanes["z"].all_reduce(data, "dropped")
            place = data.data_ptr()
            del data
            other = torch.zeros(1 << 20, device="cuda")
            assert other.data_ptr() == place  # otherwise this test proves nothing
            torch.cuda.synchronize()
            right.append(not other.any().item())
            del other
    return right


@pytest.mark.parametrize("communicators", OURS_OR_C10D)
def test_a_collective_that_is_dropped_keeps_its_memory_until_it_ends(gpu_pool, communicators):
    assert gpu_pool(2).run(drop_collectives, communicators) == [[True] * 5] * 2


def stay_away(communicators: str) -> tuple[str, float]:
    """The error, and its time, if rank 1 does not take part in a step's collectives."""
    with mock.patch.dict(os.environ, AXONN_TIMEOUT_SECONDS="5"):
        grid = Grid(z=2)
        model, x = stack(grid, 64, 1), torch.ones(8, 64, device="cuda")
        run = Orchestrator(model, Overlap(communicators=communicators))
        model(x).sum().backward()
        run.sync_gradients()
        run.settle()
        began = time.monotonic()
        try:
            if grid.rank == 0:
                model(x).sum().backward()
                run.sync_gradients()
                run.settle()
            else:
                while time.monotonic() - began < HANG_SECONDS:
                    run._lanes["z"]._transport.check()
                    time.sleep(0.1)
        except RuntimeError as error:
            return str(error), time.monotonic() - began
    return "", time.monotonic() - began


@pytest.mark.skipif(extension.cuda is None, reason="no CUDA parts are built")
def test_a_rank_that_stays_away_is_named_on_all_ranks(gpu_pool):
    for message, seconds in gpu_pool(2).run(stay_away, "own"):
        assert "axis z" in message and "rank 1" in message
        assert seconds > 2


def test_ranks_that_differ_learn_of_it_a_step_later(gpu_pool):
    for first, second in gpu_pool(2).run(diverge_on, "cuda", GridShape(data=2)):
        assert first == ""
        assert "axis data" in second and "ranks have issued different collectives" in second


def stack(grid: Grid, width: int, num_layers: int) -> torch.nn.Sequential:
    return torch.nn.Sequential(
        *(
            Linear(width, width, grid=grid, role="expand", name=str(i), layout="replicated")
            for i in range(num_layers)
        )
    ).cuda()


def measure_steps(folder: str) -> tuple[dict[str, tuple[int, float, float]], bool]:
    """Tasks, busy and exposed seconds by axis after two steps; whether a profile was written."""
    grid = grid_of(GridShape(z=2))
    model, x = stack(grid, 1024, 4), torch.randn(512, 1024, device="cuda")
    profile = Path(folder) / f"profile{grid.rank}.json"
    with Orchestrator(model, Overlap(prefetch=1)) as run:
        exposure = Exposure(grid, run, num_steps=2, profile=profile, device="cuda")
        for step in (1, 2):
            with exposure.step(step), exposure.span("forward and backward"):
                model(x).sum().backward()
                run.sync_gradients()
                torch.cuda.current_stream().synchronize()
        totals = run.totals()
        assert "ms exposed" in "".join(exposure.summary())
    return {a: (t.num_tasks, t.busy, t.exposed) for a, t in totals.items()}, profile.exists()


@pytest.mark.timing
def test_times_are_those_of_the_streams(gpu_pool, tmp_path):
    for totals, profiled in gpu_pool(2).run(measure_steps, str(tmp_path)):
        assert profiled
        tasks, busy, exposed = totals["z"]
        # Each step has 4 weights, their 4 gradients, the biases together, and the order check.
        assert tasks == 2 * (4 + 4 + 1 + 1)
        assert exposed >= 0 and 0 < busy < 60


def peak_of_gathered_weights() -> tuple[int, int]:
    """Bytes that inference adds to the allocator's peak, with a budget of one weight or of all."""
    grid = grid_of(GridShape(z=2))
    width, peaks = 2048, []
    for num_held in (1, 8):
        model, x = stack(grid, width, 8), torch.randn(8, width, device="cuda")
        with Orchestrator(
            model, Overlap(prefetch=1, gathered_bytes=num_held * width**2 * 4)
        ) as run:
            with torch.no_grad():
                model(x)  # learns the order
                run.end_step()
                gc.collect()  # the previous model and its orchestrator form a cycle
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                model(x)
                peaks.append(torch.cuda.max_memory_allocated() - before)
                run.end_step()
    return peaks[0], peaks[1]


def test_the_allocator_sees_the_budget(gpu_pool):
    weight, small = 2048**2 * 4, 1 << 20
    for tight, ample in gpu_pool(2).run(peak_of_gathered_weights):
        assert weight <= tight <= weight + small
        assert 2 * weight <= ample <= 2 * weight + small  # one in use, one being gathered


def on_two_streams() -> list[float]:
    """Errors of steps whose forward and backward use different streams, against normal steps."""
    gradients = []
    for side in (torch.cuda.Stream(), torch.cuda.current_stream()):
        model = stack(grid_of(GridShape(z=2)), 512, 4)
        x = torch.ones(256, 512, device="cuda")
        with Orchestrator(model, Overlap(prefetch=2, gathered_bytes=1)) as run:
            for last in (False, False, True):
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    loss = model(x).square().sum()
                torch.cuda.current_stream().wait_stream(side)
                if last:
                    loss.backward()
                else:
                    with run.no_sync():
                        loss.backward()
            run.sync_gradients()
        gradients.append([p.grad.cpu() for p in model.parameters()])
    return [relative_error(a, b) for a, b in zip(*gradients, strict=True)]


def test_forward_and_backward_on_different_streams(gpu_pool):
    for errors in gpu_pool(2).run(on_two_streams):
        assert len(errors) == 8 and max(errors) == 0


def compare_in_debug_mode(shape: GridShape, case: Case) -> tuple[list[str], float]:
    with mock.patch.dict(os.environ, AXONN_DEBUG_COLLECTIVES="1"):
        return compare(shape, case)


def test_collectives_are_compared(gpu_pool):
    case = dataclasses.replace(CASES["llama"], device="cuda")
    for differing, _ in gpu_pool(2).run(compare_in_debug_mode, GridShape(z=2), case):
        assert differing == []


def replay(shape: GridShape, capture_error_mode: str, communicators: str) -> list[float]:
    """Errors of a captured step's gradients, replayed on new values, against a normal step."""
    model, x = stack(grid_of(shape), 256, 3), torch.randn(64, 256, device="cuda")
    with Orchestrator(model, Overlap(bucket_bytes=4096, communicators=communicators)) as run:

        def step() -> None:
            model(x).square().sum().backward()
            run.sync_gradients()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model.zero_grad()
                step()
            run.settle()
            with torch.no_grad():
                model(x)
            run.end_step()
        torch.cuda.current_stream().wait_stream(side)
        model.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=capture_error_mode):
            step()
        x.mul_(2)
        graph.replay()
        captured = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        step()
        usual = [p.grad for p in model.parameters()]
        assert all(total.busy >= 0 for total in run.totals().values())
    return [relative_error(c.cpu(), u.cpu()) for c, u in zip(captured, usual, strict=True)]


@pytest.mark.parametrize("communicators", OURS_OR_C10D)
@pytest.mark.parametrize("mode", ["thread_local", "global"])
@pytest.mark.parametrize("shape", [GridShape(z=2), GridShape(z=2, data=2)])
def test_a_step_in_a_graph(gpu_pool, shape, mode, communicators):
    for errors in gpu_pool(shape.size).run(replay, shape, mode, communicators):
        assert len(errors) == 6 and max(errors) == 0
