"""Low-rank updates of a Linear's weight (LoRA), with few trained parameters.

Legend as in linear.py; T targets of rank R each; N_t rows of target t, of the N of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_ext.nn.sharded import Init, ParameterSpec, ShardedModule, rows_over
from axonn_ext.ranks import collectives
from axonn_ext.spec.parallel import ROLES

if TYPE_CHECKING:
    from axonn_ext.nn.linear import Linear


@dataclass(frozen=True)
class Target:
    """Rows of a Linear's weight with a separate update.

    name: the Linear that has these rows as its weight elsewhere; its last part names parameters
    size: the number of rows of the whole weight, N_t
    columns: the columns of this rank's output that they compute, [N_t / Gr]; None: all
    order: row i of ours is row order[i] of the weight elsewhere; None: the same order
    """

    name: str
    size: int
    columns: Tensor | None = None
    order: Tensor | None = None

    @property
    def short_name(self) -> str:
        return self.name.rpartition(".")[2]


class Adapter(ShardedModule):
    """Low-rank updates (LoRA) of a Linear's output, one for each target.

        y_t + alpha / R * (x @ A_t.T) @ B_t.T      y_t: the columns of target t
        A_t [R, K / Gs]      B_t [N_t / Gr, R]      x, y as in the Linear

    A starts like a torch.nn.Linear weight, B with zeros. In layout "sharded" nothing is computed
    twice. Collectives of R features per target: in "sharded", all-gather over r and reduce-scatter
    over s, in backward the reverse; in "replicated", all-reduce over s, in backward over r.
    `sync_gradients` sums the gradients over the axes that split the rows.

    Raises ValueError if the Linear moves features instead of rows (heads_over_y).
    Source: Hu et al., arXiv:2106.09685, equation 3.
    """

    def __init__(
        self, linear: Linear, targets: Sequence[Target], *, rank: int, alpha: float
    ) -> None:
        super().__init__(linear.grid)
        if linear.gather_dim or linear.scatter_dim:
            raise ValueError("Adapter: heads_over_y is not supported; use another layout or grid")
        self.targets, self.rank, self.alpha = tuple(targets), rank, alpha
        # Not read from the targets, whose names differ between blocks that share compiled code.
        self._names = [target.short_name for target in self.targets]
        self._r, self._s = ROLES[linear.role]
        self._layout, self._algorithm = linear.layout, linear.algorithm
        rows = linear.in_features
        dtype, device = linear.weight.dtype, linear.weight.device
        init = Init.uniform(1 / math.sqrt(rows))
        summed = {axis: tuple(reversed(rows_over(linear.layout, axis))) for axis in "xy"}
        for target in self.targets:
            a = ParameterSpec((rank, rows), {1: (self._s,)}, summed[self._r], init)
            b = ParameterSpec(
                (target.size, rank), {0: (self._r,)}, summed[self._s], Init.constant(0)
            )
            self.add_parameter(f"{target.short_name}_a", a, dtype=dtype, device=device)
            self.add_parameter(f"{target.short_name}_b", b, dtype=dtype, device=device)
        self._places: Tensor | None
        self.register_buffer("_places", self._find_places(linear), persistent=False)

    def _find_places(self, linear: Linear) -> Tensor | None:
        """Returns the index of each output column among the columns of all targets.

        Columns of no target get the index after the last, a column of zeros. None: all in order.
        """
        columns = [target.columns for target in self.targets if target.columns is not None]
        if not columns:
            return None
        given = torch.cat(columns)
        places = torch.full((linear.out_features // linear.grid.size(self._r),), len(given))
        places[given] = torch.arange(len(given))
        return places.to(linear.weight.device)

    def a(self, target: Target) -> nn.Parameter:
        """The parameter A of a target."""
        return self._parameter(f"{target.short_name}_a")

    def b(self, target: Target) -> nn.Parameter:
        """The parameter B of a target."""
        return self._parameter(f"{target.short_name}_b")

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns y with the updates added; x and y are the Linear's input and output, by rows."""
        narrow = F.linear(x, torch.cat([self._parameter(f"{name}_a") for name in self._names]))
        r, s = self.grid.axis(self._r), self.grid.axis(self._s)
        if self._layout == "sharded":
            narrow = collectives.all_gather(narrow, r, algorithm=self._algorithm)
            narrow = collectives.reduce_scatter(narrow, s, algorithm=self._algorithm)
        else:
            narrow = collectives.reduce_from(narrow, s, algorithm=self._algorithm)
            narrow = collectives.copy_to(narrow, r, algorithm=self._algorithm)
        narrow = narrow * (self.alpha / self.rank)
        parts = narrow.split(self.rank, -1)
        b = [self._parameter(f"{name}_b") for name in self._names]
        updates = [F.linear(n, each) for n, each in zip(parts, b, strict=True)]
        if self._places is None:
            return y + updates[0]
        return y + F.pad(torch.cat(updates, -1), (0, 1)).index_select(-1, self._places)

    @torch.no_grad()
    def weight_update(self) -> Tensor:
        """Returns the total update of the weight gathered over z, [N / Gr, K / Gs], in fp32.

        For fp64 it is computed in fp64.
        """
        wide = torch.promote_types(self.a(self.targets[0]).dtype, torch.float32)
        scale = self.alpha / self.rank
        updates = [self.b(t).to(wide) @ self.a(t).to(wide) * scale for t in self.targets]
        if self._places is None:
            return updates[0]
        return F.pad(torch.cat(updates), (0, 0, 0, 1)).index_select(0, self._places)

    def public(self, name: str) -> tuple[str, Tensor | None]:
        """Returns a parameter's name in PEFT, and the order of its rows there (`Target.order`)."""
        short, _, which = name.rpartition("_")
        [target] = [target for target in self.targets if target.short_name == short]
        return f"{target.name}.lora_{which.upper()}.weight", target.order if which == "b" else None

    def _parameter(self, name: str) -> nn.Parameter:
        parameter = getattr(self, name)
        assert isinstance(parameter, nn.Parameter)
        return parameter

    def extra_repr(self) -> str:
        names = ", ".join(target.short_name for target in self.targets)
        return f"{names}, rank={self.rank}, alpha={self.alpha}"
