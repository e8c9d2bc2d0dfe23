"""The Linear of auto_parallelize: 4D inside, whole rows of this rank outside."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from axonn_ext.models.parallelize.exchange import features_to_rows, rows_to_features
from axonn_ext.nn import Linear
from axonn_ext.ranks.grid import Grid

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# What ranks tell each other of a call. They may differ in the first alone.
_FIELDS = (
    "rows", "features of the input", "number of the dtype", "device is the weight's",
    "input needs a gradient", "weight needs a gradient", "bias needs a gradient",
    "in_features", "out_features",
)  # fmt: skip


class RowLinear(Linear):
    """y = x @ W.T + b of this rank's own rows, by an expand Linear of all ranks.

        x  [..., K]  this rank's rows, of which each rank may have another number, or none
        y  [..., N]  the same rows
        W  [N / (Gx Gz), K / Gy]            b  [N / Gx]

    Rows are exchanged for features on the way in, multiplied in layout "sharded", and exchanged
    back. Where ranks have fewer rows than others, zeros are added and cut off again, which adds
    nothing to any gradient.

    Collectives: an all-gather of 9 numbers over x, y and z (after which the host waits for the
    device), an all-to-all over the (x, y) plane, those of nn.Linear, and an all-to-all over x; in
    backward the reverse, without the 9 numbers. On a grid with x = y = z = 1 there are none.

    Raises, on every rank of x, y and z: TypeError or ValueError if one of them passes no tensor, or
    one with other features or of another device than the weight; RuntimeError if they differ in
    dtype, in which gradients they need, or in the Linear that they call.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        grid: Grid,
        bias: bool,
        label: str,
        save_gathered: bool = False,
        algorithm: str = "auto",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(
            in_features, out_features, grid=grid, role="expand", bias=bias, seed=None,
            save_gathered=save_gathered, algorithm=algorithm, dtype=dtype, device=device,
        )  # fmt: skip
        self.label = label  # what errors call it

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        most = self._agree(x)
        rows = x.reshape(-1, self.in_features)
        padded = F.pad(rows, (0, 0, 0, most - len(rows)))
        y = features_to_rows(
            super().forward(rows_to_features(padded, self.grid), weight), self.grid
        )
        return y[: len(rows)].view(*x.shape[:-1], self.out_features)

    def _agree(self, x: object) -> int:
        """Returns the most rows that a rank of x, y and z has. Raises if these ranks differ."""
        own = self._facts(x)
        group = self.grid.model_group
        calls = torch.tensor([own], dtype=torch.float64, device=self.weight.device)
        if group.size > 1:
            calls = torch.ops.axonn.all_gather(calls, 0, group.name, group.size, "auto")
        facts = [[int(number) for number in call] for call in calls.tolist()]
        ranks = dist.get_process_group_ranks(group.process_group)
        for rank, call in zip(ranks, facts, strict=True):
            self._check_call(rank, call)
            different = [i for i in range(1, len(_FIELDS)) if call[i] != facts[0][i]]
            if different:
                what = _FIELDS[different[0]]
                raise RuntimeError(
                    f"{self.label}: ranks must make the same call, but differ in: {what}, "
                    f"{facts[0][different[0]]} on rank {ranks[0]}, {call[different[0]]} on rank "
                    f"{rank}"
                )
        return max(call[0] for call in facts)

    def _facts(self, x: object) -> list[float]:
        """Returns what this rank tells the others of its call, in the order of _FIELDS."""
        features, rows, dtype, same_device, needs_grad = -1, 0, -1, False, False
        if isinstance(x, Tensor):
            features = x.shape[-1] if x.dim() else 0
            rows = x.numel() // features if features else 0
            dtype = _DTYPES.index(x.dtype) if x.dtype in _DTYPES else len(_DTYPES)
            same_device, needs_grad = x.device == self.weight.device, x.requires_grad
        grad = torch.is_grad_enabled()
        needs = [needs_grad, self.weight.requires_grad]
        needs.append(self.bias is not None and self.bias.requires_grad)
        sizes = [self.in_features, self.out_features]
        return [rows, features, dtype, same_device, *(grad and need for need in needs), *sizes]

    def _check_call(self, rank: int, call: list[int]) -> None:
        """Raises if this is a call that would be refused on one rank alone."""
        _, features, dtype, same_device, *_ = call
        if features == -1:
            raise TypeError(
                f"{self.label}: input must be a Tensor, got something else on rank {rank}"
            )
        if features != self.in_features:
            raise ValueError(
                f"{self.label}: input must have shape [..., {self.in_features}] on each rank, got "
                f"{features} features on rank {rank}"
            )
        if dtype >= len(_DTYPES) or not same_device:
            raise ValueError(
                f"{self.label}: input must be of floating point and on the device of the weight, "
                f"which it is not on rank {rank}"
            )
