"""Token and position embeddings."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_ext.nn.sharded import (
    Init,
    ParameterSpec,
    ShardedModule,
    initialize,
    own_rows,
    rows_over,
)
from axonn_ext.ops._arguments import check_tensor
from axonn_ext.ranks import collectives
from axonn_ext.ranks.grid import Grid
from axonn_ext.spec import settings
from axonn_ext.spec.parallel import LAYOUTS, check_choice


class Embedding(ShardedModule):
    """Looks up rows of a table whose vocabulary is split over x and z and its features over y.

        ids    m ids in any shape: all ids of the (data, z) group, equal on every x and y rank
        table  [V / (Gx Gz), H / Gy], laid out like the weight of an expand Linear H -> V, so that
               the two can be tied
        result [m / Gx, H / Gy]   (replicated: [m, H / Gy])

    It is a contract Linear of one-hot rows whose input needs no gather. Collectives: all-gather of
    the table over z, reduce-scatter (replicated: all-reduce) of the result over x; the reverse of
    both in backward.
    padding: number of zero rows after the V of the vocabulary, so that x and z divide the total; no
    id uses them.
    An id outside of [0, V) raises ValueError on the CPU and with AXONN_DEBUG_TOKEN_IDS; otherwise,
    on a GPU, its row is zero.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        grid: Grid,
        padding: int = 0,
        layout: str = "sharded",
        algorithm: str = "auto",
        init: Init | None = None,
        seed: int | None = 0,
        name: str = "",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(grid)
        check_choice("layout", layout, LAYOUTS)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.layout, self.algorithm = layout, algorithm
        self._checks_ids = settings.load().debug_token_ids
        spec = ParameterSpec(
            (num_embeddings + padding, embedding_dim),
            {0: ("x", "z"), 1: ("y",)},
            ("data",),
            init or Init.normal(1.0),
            padding=padding,
        )
        self.add_parameter("weight", spec, dtype=dtype, device=device)
        if seed is not None:
            initialize(self, seed=seed, prefix=name)

    def gather_weight(self) -> Tensor:
        """Returns the table gathered over z, [V / Gx, H / Gy]; see Linear.gather_weight."""
        if self.weight_source is not None:
            return self.weight_source.gather(self.weight)
        return collectives.all_gather(self.weight, self.grid.axis("z"), algorithm=self.algorithm)

    def forward(self, ids: Tensor, weight: Tensor | None = None) -> Tensor:
        check_tensor("Embedding", "ids", ids)
        table = self.gather_weight() if weight is None else weight
        axis = self.grid.axis("x")
        if self.weight_source is not None:
            look_up = partial(self._look_up, ids)
            rows = self.weight_source.apply([table], look_up, saves_weights=False)
        else:
            rows = self._look_up(ids, table)
        if self.layout == "sharded":
            return collectives.reduce_scatter(rows, axis, algorithm=self.algorithm)
        return collectives.reduce_from(rows, axis, algorithm=self.algorithm)

    def _look_up(self, ids: Tensor, table: Tensor) -> Tensor:
        """Returns the rows of the ids, with zeros for rows in another x rank's table."""
        local, is_here = torch.ops.axonn.local_rows(
            ids,
            self.grid.axis("x").rank * table.shape[0],
            table.shape[0],
            self.num_embeddings,
            None,
            self._checks_ids,
            "Embedding: ids",
            self.grid.rank,
        )
        return F.embedding(local.flatten(), table) * is_here.flatten()[:, None]

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, layout={self.layout}"


class PositionEmbedding(ShardedModule):
    """Adds a learned vector for each position to the activations.

    x [m / Gx, H / Gy] (replicated: [m, H / Gy]); rows are the flattened batch, so a rank's block
    may begin within a sequence. The module issues no collectives. offset: number of table rows
    before position 0. positions: [sequences, length] of the (data, z) group; default 0, 1, 2, ...
    in each sequence.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_positions: int,
        embedding_dim: int,
        *,
        grid: Grid,
        offset: int = 0,
        layout: str = "sharded",
        init: Init | None = None,
        seed: int | None = 0,
        name: str = "",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(grid)
        check_choice("layout", layout, LAYOUTS)
        self.num_positions, self.offset, self.layout = num_positions, offset, layout
        rows_axes = rows_over(layout, "x")
        spec = ParameterSpec(
            (offset + num_positions, embedding_dim),
            {1: ("y",)},
            tuple(reversed(rows_axes)),
            init or Init.normal(1.0),
        )
        self.add_parameter("weight", spec, dtype=dtype, device=device)
        if seed is not None:
            initialize(self, seed=seed, prefix=name)

    def forward(self, x: Tensor, sequence_length: int, positions: Tensor | None = None) -> Tensor:
        check_tensor("PositionEmbedding", "x", x, self.weight.device)
        if sequence_length > self.num_positions:
            raise ValueError(
                f"PositionEmbedding: sequence_length={sequence_length} must be at most "
                f"num_positions={self.num_positions}"
            )
        axis, sharded = self.grid.axis("x"), self.layout == "sharded"
        if positions is None:
            first = axis.rank * x.shape[0] if sharded else 0
            rows = (torch.arange(x.shape[0], device=x.device) + first) % sequence_length
        else:
            rows = positions.flatten()
            rows = own_rows(rows, axis.rank, axis.size) if sharded else rows
        return x + F.embedding(rows + self.offset, self.weight)
