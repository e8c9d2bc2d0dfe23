"""Muon on a grid, compared with torch.optim.Muon on whole matrices."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from axonn_ext import GridShape, models
from axonn_ext.models import ModelConfig, ParallelConfig
from axonn_ext.nn.sharded import ShardedParameter, sharded_parameters
from axonn_ext.optim import ParameterGroup, freeze
from axonn_ext.optim.matrices import adjustment
from axonn_ext.optim.muon import Muon
from axonn_ext.optim.newton_schulz import COEFFICIENTS, Mesh, orthogonalised
from axonn_ext.spec.optimizer import NEWTON_SCHULZ_STEPS
from grids import grid_of
from model_cases import GPT2, random_batch
from steps import compute_gradients

NUM_STEPS = 3
LR, DECAY, MOMENTUM = 2e-2, 0.1, 0.9
SIZES = ((24, 40), (40, 24), (32, 32), (160, 12), (12, 24), (24, 6), (3, 8))  # of matrices
ROLES = (("x", "y"), ("y", "x"))


def exact(matrix: Tensor) -> Tensor:
    """The orthogonalised matrix in fp64, without any split."""
    a, b, c = COEFFICIENTS
    x = matrix.double()
    x = x.t() if x.shape[0] > x.shape[1] else x
    x = x / x.norm()
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.t()
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.t() if matrix.shape[0] > matrix.shape[1] else x


def orthogonal_errors(shape: GridShape, algorithm: str) -> list[tuple[float, bool]]:
    """The relative error in fp64 for each size and role, and whether zeros were added."""
    grid, found = grid_of(shape), []
    for sizes in SIZES:
        for rows, columns in ROLES:
            dims = {0: (rows, "z"), 1: (columns,)}
            if any(sizes[dim] % grid.num_parts(axes) for dim, axes in dims.items()):
                continue
            generator = torch.Generator().manual_seed(sizes[0])
            whole = torch.randn(sizes, generator=generator, dtype=torch.float64)
            mesh = Mesh.of(grid, sizes, dims, algorithm=algorithm)
            want = grid.shard(exact(whole), dims)
            got = orthogonalised(grid.shard(whole, dims), mesh)
            assert got.shape == want.shape
            found.append((float((got - want).norm() / want.norm()), mesh.padding > 0))
    return found


@dataclasses.dataclass
class Reference:
    """A whole matrix as torch.optim.Muon updates it, and as fp64 would; both in fp32 masters."""

    parameter: ShardedParameter
    start: Tensor
    torchs: nn.Parameter
    exact: Tensor
    momentum: Tensor

    @classmethod
    def of(cls, p: ShardedParameter) -> Reference:
        start = p.whole(p.parameter.detach()).float().clone()
        torchs = nn.Parameter(start.clone())
        return cls(p, start, torchs, start.double(), torch.zeros_like(start))

    def step(self, adjust_lr: str) -> None:
        """Updates `exact`, and gives torch its gradient."""
        assert self.parameter.parameter.grad is not None
        gradient = self.parameter.whole(self.parameter.parameter.grad).float()
        self.torchs.grad = gradient
        self.momentum.lerp_(gradient, 1 - MOMENTUM)
        update = exact(gradient.lerp(self.momentum, MOMENTUM))
        rate = LR * adjustment(adjust_lr, tuple(self.start.shape))
        self.exact.mul_(1 - LR * DECAY).sub_(update, alpha=rate)

    def errors(self, master: Tensor) -> tuple[float, float]:
        """Our error and torch's, relative to how far the matrix has moved."""
        moved = (self.exact - self.start).norm()
        return tuple(
            float((t.detach().double() - self.exact).norm() / moved)
            for t in (self.parameter.whole(master.detach()), self.torchs)
        )


def against_torch(
    shape: GridShape, config: ModelConfig, layout: str, dtype: torch.dtype, adjust_lr: str
) -> dict[str, Any]:
    """Trains a few steps; every optimizer gets the same gradients.

    errors: ours and torch's of each matrix. same: whether they are bitwise equal. others: the
    largest relative difference of the other parameters from torch.optim.AdamW. momentum: whether
    all ranks have that of all matrices. cast: whether parameters are their masters in the dtype.
    """
    grid = grid_of(shape)
    model = models.build(config, grid, ParallelConfig(layout=layout), seed=4, dtype=dtype)
    matrices = model.hidden_matrices()
    optimizer = Muon(
        model, matrices=matrices, lr=LR, momentum=MOMENTUM, weight_decay=DECAY, adjust_lr=adjust_lr
    )
    own = {id(m) for m in matrices}
    every = list(sharded_parameters(model))
    references = [Reference.of(p) for p in every if id(p.parameter) in own]
    rest = [Reference.of(p) for p in every if id(p.parameter) not in own]
    muon = torch.optim.Muon(
        [r.torchs for r in references], lr=LR, weight_decay=DECAY, momentum=MOMENTUM,
        adjust_lr_fn=adjust_lr,
    )  # fmt: skip
    adamw = torch.optim.AdamW(
        [{"params": [r.torchs for r in rest if r.torchs.dim() > 1], "weight_decay": DECAY},
         {"params": [r.torchs for r in rest if r.torchs.dim() == 1], "weight_decay": 0.0}],
        lr=LR, betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
    ids, labels = (grid.shard(t, {0: ("data", "z")}) for t in random_batch())
    for step in range(NUM_STEPS):
        compute_gradients(model, None, [((ids + step) % 64, labels)], 48.0)
        for reference in references:
            reference.step(adjust_lr)
        for reference in rest:
            p = reference.parameter
            assert p.parameter.grad is not None
            reference.torchs.grad = p.whole(p.parameter.grad).float()
        muon.step()
        adamw.step()
        optimizer.step()
        optimizer.zero_grad()
    masters = {id(piece.parameter): piece.master for piece in optimizer.pieces}
    moved = {id(p.parameter): p.state.get("momentum_buffer") for p in optimizer.pieces}
    others = [
        float((r.parameter.whole(masters[id(r.parameter.parameter)]) - r.torchs).norm()
              / r.torchs.norm())
        for r in rest
    ]  # fmt: skip
    return {
        "errors": [r.errors(masters[id(r.parameter.parameter)]) for r in references],
        "same": all(torch.equal(r.parameter.whole(masters[id(r.parameter.parameter)]), r.torchs)
                    for r in references),
        "others": max(others),
        "momentum": all(torch.equal(r.parameter.whole(moved[id(r.parameter.parameter)]), r.momentum)
                        for r in references),
        "cast": all(torch.equal(p.parameter, masters[id(p.parameter)].to(dtype)) for p in every),
    }  # fmt: skip


def groups_are_torchs() -> bool:
    """Whether matrices of groups have the bits of torch.optim.Muon's with these groups' options."""
    grid = grid_of(GridShape())
    model = models.build(GPT2, grid, seed=4)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = (
        ParameterGroup("blocks.0.*qkv*", lr_factor=0.25, weight_decay=0.5),
        ParameterGroup("blocks.1.*", frozen=True),
    )
    freeze(model, groups)
    matrices = model.hidden_matrices()
    optimizer = Muon(model, matrices=matrices, lr=LR, weight_decay=DECAY, groups=groups)
    names = {id(p): name for name, p in model.named_parameters()}
    copies = {names[id(p)]: nn.Parameter(p.detach().clone()) for p in matrices if p.requires_grad}
    first = [p for name, p in copies.items() if groups[0].matches(name)]
    rest = [p for name, p in copies.items() if not groups[0].matches(name)]
    assert first and rest
    reference = torch.optim.Muon(
        [{"params": first, "weight_decay": 0.5, "factor": 0.25}, {"params": rest, "factor": 1.0}],
        lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    ids, labels = random_batch()
    for step in range(NUM_STEPS):
        compute_gradients(model, None, [((ids + step) % 64, labels)], 48.0)
        for name, p in model.named_parameters():
            if name in copies:
                copies[name].grad = p.grad
        for group in reference.param_groups:
            group["lr"] = group["factor"] * LR / (1 + step)
        reference.step()
        optimizer.step(LR / (1 + step))
        optimizer.zero_grad()
    trained = dict(model.named_parameters())
    frozen = [name for name in trained if groups[1].matches(name)]
    return all(torch.equal(trained[name], p) for name, p in copies.items()) and all(
        torch.equal(trained[name], start[name]) for name in frozen
    )


def refusals() -> list[str]:
    """The error messages for invalid uses."""
    config = dataclasses.replace(models.ModelConfig(64, 32, 2, 4, 8), family="gpt2")
    model = models.build(config, grid_of(GridShape(pipe=2, data=2)), seed=0)
    matrices = model.hidden_matrices()
    (block,) = model.blocks.children()
    found = []
    for options in (
        {"momentum": 1.0},
        {"ema_decay": 1.0},
        {"adjust_lr": "big"},
        {"zero": 3},
        {"zero": 2},
        {"matrices": [block.norm_1.weight]},
        {"matrices": [nn.Parameter(torch.ones(3, 5))]},
    ):
        try:
            Muon(model, **{"matrices": matrices, "lr": 1.0} | options)
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found
