"""The systems that are compared. Each has a builder, which returns a training step.

All systems train the same model from the same weights on the same batches. A step has forward,
backward, the sum of gradients over ranks, clipping by their global norm, and AdamW (torch's fused
one, with decay on matrices only). In bf16 each system uses the mixed precision that its users would
choose: FSDP2 its policy, torch's other systems autocast, ours bf16 parameters. All systems update
weights in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from axonn_ext import Grid, clip_grad_norm_, full_state_dict, models, sync_gradients
from axonn_ext.bench.train.gpt import TorchGPT, load_whole
from axonn_ext.bench.train.plan import BF16, OURS, SINGLE, Plan, SystemSpec, Workload
from axonn_ext.optim import AdamW

State = Mapping[str, Tensor]  # whole tensors with the names of our GPT-2's parameters
ADAM_EPS = 1e-8


class Step(NamedTuple):
    """The results of a step: the loss before the update, and the gradient norm before clipping."""

    loss: Tensor
    norm: Tensor


@dataclass(frozen=True)
class System:
    """A system that can be measured.

    step         does one training step; None: this rank has no part in it
    local_loss   whether the loss of `step` covers only this rank's part of the batch
    num_threads  the number of threads of each rank that takes part
    """

    name: str
    step: Callable[[], Step] | None
    local_loss: bool = False
    num_threads: int = 1


def whole_initial_state(plan: Plan) -> State:
    """Returns the initial weights, equal for every number of ranks; all ranks must call this.

    Every rank holds all of them, which is needed only to compare systems.
    """
    grid = Grid(data=dist.get_world_size())
    model = models.build(
        plan.workload.model, grid, plan.parallel, seed=plan.workload.seed, device=plan.device
    )
    return model.import_state(full_state_dict(model))


def build_system(spec: SystemSpec, plan: Plan, state: State | None) -> System:
    """Returns the system, ready to step; all ranks must call this.

    Without `state`, each rank starts from its own weights, so that memory has no second copy.
    """
    if spec.kind == OURS:
        assert spec.grid is not None
        return System(spec.name, _ours(Grid(**spec.grid.as_dict()), plan, zero=spec.zero))
    if spec.kind == SINGLE:
        step = _single(plan, state) if dist.get_rank() == 0 else None
        return System(spec.name, step, num_threads=plan.single_threads)
    if spec.kind == "ddp":
        return System(spec.name, _ddp(plan, state), local_loss=True)
    if spec.kind == "fsdp2":
        return System(spec.name, _fsdp2(plan, state), local_loss=True)
    if spec.kind in ("tp", "tp-sp"):
        return System(spec.name, _tensor_parallel(plan, state, spec.kind == "tp-sp"))
    raise ValueError(f"kind must be a baseline or {OURS!r}, got {spec.kind!r}")


def batches(workload: Workload) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields token ids and labels [B, S] of one step after another, equal on every rank."""
    generator = torch.Generator().manual_seed(workload.seed)
    model = workload.model
    shape = (workload.batch_size, model.sequence_length + 1)
    while True:
        tokens = torch.randint(model.vocab_size, shape, generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def _moved(batch: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """Moves a batch from the host to the device, asynchronously for a GPU."""
    if device.type == "cpu":
        return list(batch)
    return [t.contiguous().pin_memory().to(device, non_blocking=True) for t in batch]


def device_of(model: nn.Module) -> torch.device:
    """Returns where the model's parameters are."""
    return next(model.parameters()).device


# --- Ours ----------------------------------------------------------------------------------------


def _ours(grid: Grid, plan: Plan, *, zero: int) -> Callable[[], Step]:
    workload = plan.workload
    dtype = torch.bfloat16 if workload.dtype == BF16 else torch.float32
    model = models.build(
        workload.model, grid, plan.parallel, seed=workload.seed, dtype=dtype, device=plan.device
    )

    def gradients(token_ids: Tensor, labels: Tensor) -> Tensor:
        loss = model.loss(token_ids, labels, float(workload.tokens_per_step))
        loss.backward()
        sync_gradients(model)
        return loss

    return our_step(model, grid, workload, gradients, zero=zero)


def our_step(
    model: nn.Module, grid: Grid, workload: Workload, gradients: Callable[[Tensor, Tensor], Tensor],
    *, zero: int = 0,
) -> Callable[[], Step]:  # fmt: skip
    """Returns a training step of a model on a grid, or of this rank's stage of it.

    gradients(token ids, labels): computes all gradients from the sequences of this rank's
    (data, z) group, and returns the loss of the whole batch. zero: see AdamW.
    """
    optimizer = AdamW(
        model, lr=workload.learning_rate, betas=workload.betas, eps=ADAM_EPS,
        weight_decay=workload.weight_decay, zero=zero,
    )  # fmt: skip
    source, device = batches(workload), device_of(model)
    rows = {0: ("data", "z")}

    def step() -> Step:
        token_ids, labels = _moved((grid.shard(t, rows) for t in next(source)), device)
        optimizer.zero_grad()
        loss = gradients(token_ids, labels)
        norm = clip_grad_norm_(model, workload.clip_norm)
        optimizer.step()
        return Step(loss.detach(), norm)

    return step


# --- Torch's own ---------------------------------------------------------------------------------


def _whole(plan: Plan, state: State | None) -> TorchGPT:
    with torch.device(plan.device):
        model = TorchGPT(plan.workload.model)
    if state is not None:
        load_whole(model, state)
    return model


def _single(plan: Plan, state: State | None) -> Callable[[], Step]:
    return torch_step(_whole(plan, state), plan.workload)


def _ddp(plan: Plan, state: State | None) -> Callable[[], Step]:
    model = _whole(plan, state)
    wrapped = DistributedDataParallel(
        model, gradient_as_bucket_view=True,
        device_ids=[torch.cuda.current_device()] if plan.device == "cuda" else None,
    )  # fmt: skip
    return torch_step(wrapped, plan.workload, part=dist.get_rank(), num_parts=dist.get_world_size())


def _fsdp2(plan: Plan, state: State | None) -> Callable[[], Step]:
    """Makes each block an FSDP unit; embeddings, last norm and tied head are in the root unit."""
    workload, reshard = plan.workload, plan.parallel.reshard_after_forward
    mesh = init_device_mesh(plan.device, (dist.get_world_size(),))
    with torch.device("meta"):
        model = TorchGPT(workload.model)
    policy = MixedPrecisionPolicy()
    if workload.dtype == BF16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    _materialize(model, state, plan.device)
    return torch_step(
        model, workload, part=mesh.get_local_rank(), num_parts=mesh.size(), autocast=False
    )


def _tensor_parallel(
    plan: Plan, state: State | None, sequence_parallel: bool
) -> Callable[[], Step]:
    """Splits the matrices over all ranks like Megatron, and gathers the logits.

    sequence_parallel: the sequence is also split, between the matrices.
    """
    workload = plan.workload
    mesh = init_device_mesh(plan.device, (dist.get_world_size(),))
    with torch.device("meta"):
        model = TorchGPT(workload.model)
    outer, inner = _tensor_parallel_plan(sequence_parallel)
    parallelize_module(model, mesh, outer)
    for block in model.blocks:
        parallelize_module(block, mesh, inner)
    _materialize(model, state, plan.device)
    positions = torch.arange(workload.model.sequence_length, device=plan.device)
    if sequence_parallel:
        positions = positions.chunk(mesh.size())[mesh.get_local_rank()]
    return torch_step(model, workload, positions=positions)


def _tensor_parallel_plan(
    sequence_parallel: bool,
) -> tuple[dict[str, ParallelStyle], dict[str, ParallelStyle]]:
    """Returns the styles of the model's modules, and those of a block's modules."""
    between = Shard(1) if sequence_parallel else Replicate()
    outer: dict[str, ParallelStyle] = {
        "wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    inner: dict[str, ParallelStyle] = {
        "attention.qkv": ColwiseParallel(input_layouts=between),
        "attention.out": RowwiseParallel(output_layouts=between),
        "mlp.up": ColwiseParallel(input_layouts=between),
        "mlp.down": RowwiseParallel(output_layouts=between),
    }
    if sequence_parallel:
        outer |= {
            "wpe": SequenceParallel(sequence_dim=0, use_local_output=True),
            "norm": SequenceParallel(),
        }
        inner |= {"norm_1": SequenceParallel(), "norm_2": SequenceParallel()}
    return outer, inner


@torch.no_grad()
def _materialize(model: TorchGPT, state: State | None, device: str) -> None:
    """Gives memory, ties and values to a model that was split on the meta device."""
    model.to_empty(device=device)
    model.lm_head.weight = model.wte.weight
    if state is not None:
        load_whole(model, state)
        return
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local.normal_(std=0.02)


def torch_step(
    model: nn.Module,
    workload: Workload,
    *,
    positions: Tensor | None = None,
    part: int = 0,
    num_parts: int = 1,
    autocast: bool = True,
) -> Callable[[], Step]:
    """Returns a training step on one of `num_parts` parts of every batch.

    autocast: whether torch.autocast casts to bf16, rather than the model itself.
    """
    device = device_of(model)
    if positions is None:
        positions = torch.arange(workload.model.sequence_length, device=device)
    groups = _groups(list(model.parameters()))
    optimizer = torch.optim.AdamW(
        [
            {"params": g, "weight_decay": workload.weight_decay if g[0].ndim >= 2 else 0.0}
            for g in groups
        ],
        lr=workload.learning_rate, betas=workload.betas, eps=ADAM_EPS, fused=True,
    )  # fmt: skip
    source, mixed = batches(workload), autocast and workload.dtype == BF16

    def step() -> Step:
        token_ids, labels = _moved((t.chunk(num_parts)[part] for t in next(source)), device)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            logits = model(token_ids, positions)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        norm = _clip(groups, workload.clip_norm)
        optimizer.step()
        return Step(loss.detach(), norm)

    return step


def _groups(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Returns groups of matrices and of other parameters, with DTensors in separate groups.

    The kernels of the optimizer and the norm do not accept DTensors together with plain tensors.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        key = (isinstance(parameter, DTensor), parameter.ndim >= 2)
        groups.setdefault(key, []).append(parameter)
    return list(groups.values())


def _clip(groups: Sequence[Sequence[nn.Parameter]], max_norm: float) -> Tensor:
    """Clips the gradients of several groups by their common norm, which it returns."""
    norms = []
    for group in groups:
        norm = get_total_norm([p.grad for p in group if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for group in groups:
        total = norm
        if isinstance(group[0], DTensor):
            mesh = group[0].device_mesh
            total = DTensor.from_local(norm, mesh, [Replicate()] * mesh.ndim, run_check=False)
        clip_grads_with_norm_(group, max_norm, total)
    return norm
