"""The orchestrator: the same bits with overlap and without, and its memory limits."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from axonn_ext import Grid, GridShape, models, sync_gradients, trace_communication
from axonn_ext.models import ParallelConfig
from axonn_ext.nn import Linear
from axonn_ext.overlap import Orchestrator, Overlap
from axonn_ext.overlap.sums import ScatteredSums, sum_of_blocks
from grids import grid_of, relative_error
from model_cases import CONFIGS, GPT2, LLAMA, random_batch
from overlap_cases import LIMITS, ON, STEPS, Case, backward, compare, train

CASES = {
    "gpt2": Case(),
    "llama": Case(LLAMA, micro_batches=2),
    "llama-tied": Case(CONFIGS["llama-tied"]),
    "replicated": Case(LLAMA, ParallelConfig(layout="replicated")),
    "recompute": Case(GPT2, ParallelConfig(recompute="full"), micro_batches=2),
    "recompute every:2": Case(GPT2, ParallelConfig(recompute="every:2"), micro_batches=2),
    "bf16": Case(LLAMA, dtype=torch.bfloat16),
    "fp64": Case(dtype=torch.float64),
}


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("shape", [GridShape(z=2, data=2), GridShape(x=2, z=2), GridShape(z=4)])
def test_the_same_bits_on_and_off_4_ranks(pool, case, shape):
    for differing, error in pool(4).run(compare, shape, CASES[case]):
        assert differing == []
        assert error < LIMITS[CASES[case].dtype]


@pytest.mark.parametrize("shape", [GridShape(x=2, z=2, data=2), GridShape(y=2, data=4)])
def test_the_same_bits_on_and_off_8_ranks(pool, shape):
    case = Case(LLAMA, micro_batches=1)
    for differing, error in pool(8).run(compare, shape, case):
        assert differing == []
        assert error < LIMITS[case.dtype]


# --- The order of prefetch, and what happens when it changes --------------------------------------


class Shuffled(nn.Module):
    """Linears whose order may change in every step."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.order = [0, 1, 2, 3]
        self.layers = nn.ModuleList(
            Linear(16, 16, grid=grid, role="expand", name=str(i), layout="replicated")
            for i in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.layers[index](x).tanh()
        return x


ORDERS = [[0, 1, 2, 3], [0, 1, 2, 3], [0, 3, 1, 2], [0, 3, 1, 2], [0, 1, 2, 3], [0, 3, 1], [3, 3]]


def run_shuffled(overlap: Overlap | None) -> tuple[list[Tensor], list[list[str]], list[int]]:
    """Gradients, the gathers of each step as issued, and mispredictions so far."""
    grid = grid_of(GridShape(z=4))
    model = Shuffled(grid)
    orchestrator = None if overlap is None else Orchestrator(model, overlap)
    gradients, gathers, mispredictions = [], [], []
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
    for order in ORDERS:
        model.order = order
        if orchestrator is None:
            model(x).square().sum().backward()
            sync_gradients(model)
        else:
            orchestrator.record(True)
            model(x).square().sum().backward()
            records = sorted(orchestrator.take_records()["z"], key=lambda task: task.sequence)
            gathers.append([t.name for t in records if t.name.startswith("all_gather")])
            orchestrator.sync_gradients()
            orchestrator.take_records()
            mispredictions.append(orchestrator.num_mispredictions)
        gradients += [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
    return gradients, gathers, mispredictions


def names(phase: str, order: list[int]) -> list[str]:
    return [f"all_gather layers.{i}.weight for {phase}" for i in order]


def test_prefetch_follows_the_order_that_was_executed(pool):
    """With room for two weights, each is gathered in forward and again in backward."""
    two = 2 * 16 * 16 * 4
    results = pool(4).run(run_shuffled, Overlap(prefetch=1, gathered_bytes=two))
    without = pool(4).run(run_shuffled, None)
    for (gradients, gathers, mispredictions), (expected, _, _) in zip(
        results, without, strict=True
    ):
        assert all(relative_error(g, e) < 1e-5 for g, e in zip(gradients, expected, strict=True))
        # The last two layers are still gathered from forward when backward starts.
        assert gathers[0][:4] == gathers[1][:4] == names("forward", [0, 1, 2, 3])
        assert gathers[1][4:] == names("backward", [1, 0])
        assert gathers[3][:4] == names("forward", [0, 3, 1, 2])
        # A step is predicted to repeat the latest step that began the same way. The last but one
        # departs from the previous order, then from the one before; the last begins in a new way.
        assert mispredictions == [0, 0, 1, 1, 2, 4, 4]


def issued_after_each_layer(model: Shuffled) -> list[int]:
    """The number of gathers in a trace after the first, second, ... layer has run."""
    counts: list[int] = []
    with trace_communication() as trace:
        hooks = [
            layer.register_forward_hook(lambda *_: counts.append(len(trace.records)))
            for layer in model.layers
        ]
        model(torch.ones(4, 16))
    for hook in hooks:
        hook.remove()
    return counts


def traced_prefetch() -> list[list[int]]:
    model = Shuffled(grid_of(GridShape(z=4)))
    steps = []
    with Orchestrator(model, Overlap(prefetch=2)) as orchestrator:
        for order in ([0, 1, 2, 3], [0, 1, 2, 3], [1, 0, 2, 3], [1, 0, 2, 3]):
            model.order = order
            steps.append(issued_after_each_layer(model))
            orchestrator.end_step()
    return steps


def test_prefetch_runs_two_layers_ahead_once_the_order_is_known(pool):
    unknown, known = [1, 2, 3, 4], [3, 4, 4, 4]
    for steps in pool(4).run(traced_prefetch):
        assert steps == [unknown, known, unknown, known]


# --- Memory ---------------------------------------------------------------------------------------


class GatheredMemory(TorchDispatchMode):
    """Records the peak bytes of the storages that all-gathers wrote to."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.peak = self.num_gathers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "c10d::_allgather_base_" and args[0].dtype.is_floating_point:
            storage = args[0].untyped_storage()
            self.storages[storage._cdata] = storage
            self.num_gathers += 1
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, sum(s.nbytes() for s in self.storages.values()))
        return result


def gathered_peak(budget: int, recompute: str, prefetch: int) -> tuple[int, int]:
    """(most bytes gathered at once, gathers) over three steps, seen from outside."""
    grid = grid_of(GridShape(z=4))
    model = models.build(LLAMA, grid, ParallelConfig(recompute=recompute), seed=2)
    with Orchestrator(model, Overlap(prefetch=prefetch, gathered_bytes=budget)) as orchestrator:
        with GatheredMemory() as memory:
            for _ in range(STEPS):
                backward(model, grid, Case(LLAMA), orchestrator)
                orchestrator.sync_gradients()
                assert sum(s.nbytes() for s in orchestrator.gathered_storages()) == 0
    return memory.peak, memory.num_gathers


LARGEST = 96 * 32 * 4  # gate and up of LLAMA


@pytest.mark.parametrize(
    ("recompute", "prefetch"), [("none", 3), ("every:2", 0), ("full", 0), ("full", 3)]
)
def test_gathered_bytes_stay_within_the_budget(pool, recompute, prefetch):
    everything = pool(4).run(gathered_peak, 1 << 30, recompute, prefetch)[0]
    num_gathers = []
    for budget in (2 * LARGEST, 3 * LARGEST, 5 * LARGEST):
        results = pool(4).run(gathered_peak, budget, recompute, prefetch)
        assert all(LARGEST < peak <= budget for peak, _ in results)
        num_gathers.append(results[0][1])
    assert everything[0] > 5 * LARGEST, "no budget was short"
    # More memory, fewer gathers; with enough memory, each weight is gathered once per step.
    assert num_gathers == sorted(num_gathers, reverse=True)
    assert num_gathers[0] > num_gathers[-1] > everything[1] == STEPS * 10


class SummedMemory(TorchDispatchMode):
    """Records the bytes of the storages that all-reduces wrote to: of each, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[tuple[StorageWeakRef, int]] = []
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "c10d::allreduce_":
            storage = args[0][0].untyped_storage()
            self.storages.append((StorageWeakRef(storage), storage.nbytes()))
        result = func(*args, **(kwargs or {}))
        alive = sum(size for storage, size in self.storages if not storage.expired())
        self.peak = max(self.peak, alive)
        return result


def summed_peak(dtype: torch.dtype) -> tuple[int, list[int], int]:
    """The peak bytes of gradient buckets, the bytes of each, and the number of backward's own
    gradients that were still held while their buckets were in flight."""
    grid = grid_of(GridShape(data=2))
    model = models.build(LLAMA, grid, seed=2, dtype=dtype)
    made: list[tuple[nn.Parameter, StorageWeakRef]] = []

    def note(p: nn.Parameter) -> None:
        made.append((p, StorageWeakRef(p.grad.untyped_storage())))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(note)  # registered before the orchestrator's
    with Orchestrator(model, Overlap(bucket_bytes=1500)) as orchestrator:
        with SummedMemory() as memory:
            backward(model, grid, Case(LLAMA, dtype=dtype), orchestrator)
            kept = [p for p, storage in made if p.grad is None and not storage.expired()]
            assert any(p.grad is None for p, _ in made), "no bucket was full"
            orchestrator.sync_gradients()
    assert all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())
    return memory.peak, [size for _, size in memory.storages], len(kept)


def test_sums_of_low_precision_take_the_memory_of_two_buckets(pool):
    for peak, sizes, num_kept in pool(2).run(summed_peak, torch.bfloat16):
        limit = 3 * max(sizes)  # two, and one that a c10d thread may be about to drop
        assert peak <= limit < 0.7 * sum(sizes)
        assert num_kept == 0


def test_gradients_on_their_way_are_held_once(pool):
    for peak, sizes, num_kept in pool(2).run(summed_peak, torch.float32):
        assert peak == sum(sizes), "the sums become the gradients"
        assert num_kept == 0


# --- Several models, and mistakes -----------------------------------------------------------------


def two_models() -> list[str]:
    """Two interleaved models give the same results as each alone; closing restores a model."""
    grid = grid_of(GridShape(z=2, data=2))
    alone = [train(grid, Case(config), ON) for config in (GPT2, LLAMA)]
    built = [models.build(config, grid, seed=2) for config in (GPT2, LLAMA)]
    orchestrators = [Orchestrator(model, ON) for model in built]
    losses = [model.loss(*(grid.shard(t, {0: ("data", "z")}) for t in random_batch()))
              for model in built]  # fmt: skip
    for loss in reversed(losses):
        loss.backward()
    for orchestrator in orchestrators:
        orchestrator.sync_gradients()
    wrong = [
        name
        for model, record in zip(built, alone, strict=True)
        for name, p in model.named_parameters()
        if relative_error(p.grad, record[f"0 {name}.grad"]) > 1e-5
    ]
    with pytest.raises(ValueError, match="has another one already"):
        Orchestrator(built[0])
    twin = copy.deepcopy(built[0])
    Orchestrator(twin).close()  # a copy belongs to no orchestrator
    for orchestrator in orchestrators:
        orchestrator.close()
    Orchestrator(built[0]).close()
    return wrong


def test_two_models_at_once(pool):
    for wrong in pool(4).run(two_models):
        assert wrong == []


def closed() -> tuple[bool, bool]:
    """Whether gradients, and the bytes on each axis, equal those without any orchestrator."""
    grid, found = grid_of(GridShape(z=2, data=2)), []
    for had_one in (False, True):
        model = models.build(LLAMA, grid, seed=2)
        if had_one:
            Orchestrator(model, Overlap(bucket_bytes=1)).close()
        ids, labels = (grid.shard(t, {0: ("data", "z")}) for t in random_batch())
        with trace_communication() as trace:
            model.loss(ids, labels, 48.0).backward()
            sync_gradients(model)
        found.append(([p.grad for p in model.parameters()], trace.bytes_by_axis()))
    (without, bytes_without), (after, bytes_after) = found
    return all(map(torch.equal, without, after)), bytes_without == bytes_after


def test_a_closed_one_leaves_nothing_behind(pool):
    assert pool(4).run(closed) == [(True, True)] * 4


class CountingLane:
    """A lane of two ranks that send the same; counts exchanges without a wait."""

    axis = SimpleNamespace(size=2)
    under_way = 0

    def all_to_all(self, blocks: Tensor, gradient: Tensor, name: str) -> SimpleNamespace:
        blocks.copy_(gradient)
        self.under_way += 1
        return SimpleNamespace(wait=self.end)

    def end(self) -> None:
        self.under_way -= 1


def test_blocks_are_added_in_their_order_in_fp32() -> None:
    blocks = torch.randn(8 * 3, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    want = sum(block.float() for block in blocks.chunk(8))
    assert torch.equal(sum_of_blocks(blocks, 8), want.bfloat16())


@pytest.mark.parametrize("deferred", [0, 1, 3])
def test_no_more_sums_are_under_way_than_may_be_deferred(deferred: int) -> None:
    lane, counts, done = CountingLane(), [], []
    sums = ScatteredSums(lane, deferred=deferred)
    parameters = [SimpleNamespace(parameter=nn.Parameter(torch.zeros(2)), name=n) for n in "abcde"]
    for p in parameters:
        done += sums.start(p, torch.ones(4))
        counts.append(lane.under_way)
    assert counts == [min(number, deferred) for number in range(1, 6)]
    assert [p.name for p in done + sums.finish()] == list("abcde")
    assert all(torch.equal(p.parameter.grad, torch.full((2,), 2.0)) for p in parameters)


def changed_in_between() -> None:
    grid = grid_of(GridShape(z=2))
    layer = Linear(8, 8, grid=grid, role="expand")
    with Orchestrator(layer):
        y = layer(torch.ones(4, 8))
        with torch.no_grad():
            layer.weight.mul_(2)
        with pytest.raises(RuntimeError, match="weight was changed in place between"):
            y.sum().backward()


def test_a_weight_changed_between_forward_and_backward_is_an_error(pool):
    pool(2).run(changed_in_between)


def no_sync_forgotten() -> float:
    """The error of two backward passes outside of no_sync: more communication, the same sums."""
    grid = grid_of(GridShape(z=2, data=2))
    results = []
    for forgotten in (False, True):
        model = models.build(LLAMA, grid, seed=2, dtype=torch.float64)
        with Orchestrator(model, Overlap(bucket_bytes=1024)) as orchestrator:
            for part in (0, 1):
                ids, labels = (grid.shard(t, {0: ("data", "z")}) for t in random_batch())
                loss = model.loss(ids.chunk(2)[part], labels.chunk(2)[part], 48.0)
                with nullcontext() if forgotten or part else orchestrator.no_sync():
                    loss.backward()
            orchestrator.sync_gradients()
        results.append([p.grad for p in model.parameters()])
    return max(relative_error(a, b) for a, b in zip(*results, strict=True))


def test_forgetting_no_sync_changes_no_result(pool):
    assert max(pool(4).run(no_sync_forgotten)) < 1e-12


@pytest.mark.parametrize("option", ["prefetch", "gathered_bytes", "deferred", "bucket_bytes"])
def test_bad_options(option):
    with pytest.raises(ValueError, match=f"{option} must be a whole number >= "):
        Overlap(**{option: -1})


# --- Programs that do not go from forward to step -------------------------------------------------


class Together(torch.autograd.Function):
    """The product of x with two weights, one after the other, in one node, like compiled code."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        hidden = x @ first.t()
        ctx.save_for_backward(x, hidden, first, second)
        return hidden @ second.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, hidden, first, second = ctx.saved_tensors
        assert all(weight.untyped_storage().size() for weight in (first, second))
        dhidden = dy @ second
        return dhidden @ first, dhidden.t() @ x, dy.t() @ hidden


def used_together() -> float:
    """The error of gradients of weights that are used in one node, within no budget."""
    grid = grid_of(GridShape(z=2))
    options: dict[str, Any] = {"grid": grid, "role": "expand", "bias": False}
    layers = nn.ModuleList(Linear(16, 16, **options, name=name) for name in "ab").double()
    whole_x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = grid.shard(whole_x, {0: ("z",)})
    layers[1](layers[0](x)).square().sum().backward()
    expected = [p.grad for p in layers.parameters()]
    layers.zero_grad()
    with Orchestrator(layers, Overlap(prefetch=0, gathered_bytes=0)) as orchestrator:
        weights = [layer.gather_weight() for layer in layers]
        y = layers[0].weight_source.apply(weights, partial(Together.apply, x))
        assert not any(storage.size() for storage in orchestrator.gathered_storages())
        y.square().sum().backward()
        orchestrator.sync_gradients()
    got = [p.grad for p in layers.parameters()]
    return max(relative_error(a, b) for a, b in zip(got, expected, strict=True))


def test_weights_that_are_used_together(pool):
    assert max(pool(2).run(used_together)) < 1e-13  # fp64 sums of at most 16 terms


def outputs_after_a_change() -> tuple[Tensor, Tensor]:
    """Outputs with and without an orchestrator, after weights change following inference."""
    model, x = Shuffled(grid_of(GridShape(z=4))), torch.ones(4, 16)
    with torch.no_grad(), Orchestrator(model, Overlap()):
        model(x)
        for layer in model.layers:
            layer.weight.mul_(2.0)
        changed = model(x)
    with torch.no_grad():
        return changed, model(x)


def test_weights_changed_between_passes_are_gathered_again(pool):
    for got, expected in pool(4).run(outputs_after_a_change):
        assert relative_error(got, expected) < 1e-6


def gradients_after_a_skipped_step() -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of the same step, after an abandoned step and by itself."""
    model = Shuffled(grid_of(GridShape(z=2, data=2)))
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    results = []
    with Orchestrator(model, Overlap(bucket_bytes=1)) as orchestrator:
        for skip in (True, False):
            if skip:
                model(3 * x).square().sum().backward()
                orchestrator.end_step()
                model.zero_grad()
            model(x).square().sum().backward()
            orchestrator.sync_gradients()
            results.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            model.zero_grad()
    return results[0], results[1]


def test_a_skipped_step_leaves_nothing_to_the_next(pool):
    for behind, alone in pool(4).run(gradients_after_a_skipped_step):
        assert len(behind) == len(alone) > 0
        assert all(torch.equal(a, b) for a, b in zip(behind, alone, strict=True))
