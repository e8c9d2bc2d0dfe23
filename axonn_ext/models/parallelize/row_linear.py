"""The Linear of auto_parallelize: 4D inside, this rank's whole rows outside."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from axonn_ext.models.parallelize.exchange import features_to_rows, rows_to_features
from axonn_ext.nn import Linear
from axonn_ext.ranks.grid import Grid

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# The properties of a call that ranks exchange. Only the first may differ.
_FIELDS = (
    "rows", "features of the input", "number of the dtype", "device is the weight's",
    "input needs a gradient", "weight needs a gradient", "bias needs a gradient",
    "in_features", "out_features",
)  # fmt: skip


class RowLinear(Linear):
    """A Linear of this rank's own rows, which all ranks compute together as an expand Linear.

        x  [..., K]  this rank's rows; ranks may have different numbers of rows, or none
        y  [..., N]  the same rows
        W  [N / (Gx Gz), K / Gy]            b  [N / Gx]

    Rows are exchanged for features on the way in, multiplied in layout "sharded", and exchanged
    back. Ranks with fewer rows than others add zeros and remove them again, which adds nothing to
    any gradient.

    Collectives: an all-gather of 9 numbers over x, y and z (after which the host waits for the
    device), an all-to-all over the (x, y) plane, those of nn.Linear, and an all-to-all over x; in
    backward the reverse, without the 9 numbers. On a grid with x = y = z = 1 there are none.

    Raises, on every rank of x, y and z: TypeError or ValueError if one of them does not pass a
    tensor with the weight's features on the weight's device; RuntimeError if they differ in dtype,
    in the required gradients, or in the Linear that they call.
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
        self.label = label  # its name in errors

    def forward(
        self, x: Tensor, weight: Tensor | None = None, held: Tensor | None = None
    ) -> Tensor:
        most = self._agree(x)
        rows = x.reshape(-1, self.in_features)
        padded = F.pad(rows, (0, 0, 0, most - len(rows)))
        y = features_to_rows(
            super().forward(rows_to_features(padded, self.grid), weight, held), self.grid
        )
        return y[: len(rows)].view(*x.shape[:-1], self.out_features)

    def _agree(self, x: object) -> int:
        """Returns the maximum number of rows over x, y and z. Raises if their calls differ."""
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
        """Returns the properties of this rank's call, in the order of _FIELDS."""
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
        """Raises for a call that only one rank would refuse."""
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
                f"{self.label}: input must be floating-point and on the device of the weight, but "
                f"is not on rank {rank}"
            )
