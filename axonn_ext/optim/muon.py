"""Muon for matrices that a grid splits, and AdamW for the other parameters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from axonn_ext.optim.adamw import AdamW
from axonn_ext.optim.averages import Averages
from axonn_ext.optim.bucketed import RETURNING
from axonn_ext.optim.matrices import MATRIX_STATE, MatrixPiece, chosen_matrices
from axonn_ext.optim.pieces import STATE_NAMES, MasterPiece, Options, groups_of
from axonn_ext.optim.zero import Bucket, GradientShards
from axonn_ext.optim.zero.buckets import whole_buckets_of
from axonn_ext.optim.zero.shards import SummedBucket
from axonn_ext.ranks import collectives
from axonn_ext.spec.optimizer import (
    ADJUSTMENTS,
    BUCKET_ELEMENTS,
    OptimizerOptions,
    ParameterGroup,
)


class Muon(AdamW):
    """Muon for the given matrices of a module, and AdamW for its other parameters.

    A matrix's update is its momentum, orthogonalised: x, y and z multiply the blocks that they
    hold, in bf16 (`optim.newton_schulz`), and no rank keeps more than its block. Values are those
    of torch.optim.Muon on fp32 masters, within the rounding of bf16 products; on one rank they are
    bitwise equal. A parameter is one matrix, also if it holds several, as a fused qkv does.

    matrices: two-dimensional parameters of the module; for our models,
    `module.hidden_matrices()`. Embeddings, the head, norms and biases are better left to AdamW.

    momentum, nesterov: of matrices. adjust_lr: factor of the learning rate of a matrix [N, K].
    "match_rms_adamw" is 0.2 sqrt(max(N, K)), which gives updates the size of AdamW's, so that both
    can share lr and weight_decay; "original" is sqrt(max(1, N / K)). algorithm: of the products
    and collectives, as in `axonn_ext.ops`.

    Each rank of data orthogonalises its own matrices. Without ZeRO it sends these updates to the
    others in bf16, so that all have the same bits whatever algorithms they use. zero: 1 and 2 shard
    gradients and state as in AdamW, but each rank of data has whole blocks of its own matrices, and
    sends new parameters. groups, ema_decay: as in AdamW, also for matrices. The other options are
    for the other parameters.

    Bytes per element of a matrix in bf16 or fp16: weight 2, gradient 2, master 4 and momentum 4;
    with zero, the last two only for a rank's own matrices.
    Sources: Jordan et al., Muon, 2024 (https://kellerjordan.github.io/posts/muon/); Liu et al.,
    Muon is Scalable for LLM Training (https://arxiv.org/abs/2502.16982), section 2.2, for
    "match_rms_adamw".

    Raises ValueError for other values, or for matrices that are not 2D parameters of the module.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        matrices: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        adjust_lr: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        groups: Sequence[ParameterGroup] = (),
        zero: int = 0,
        ema_decay: float = 0.0,
        bucket_elements: int = BUCKET_ELEMENTS,
        algorithm: str = "auto",
    ) -> None:
        OptimizerOptions(zero, "none", bucket_elements)
        if not 0 <= momentum < 1:
            raise ValueError(f"Muon: momentum must be in [0, 1), got {momentum}")
        if not 0 <= ema_decay < 1:
            raise ValueError(f"Muon: ema_decay must be in [0, 1), got {ema_decay}")
        if adjust_lr not in ADJUSTMENTS:
            expected = ", ".join(ADJUSTMENTS)
            raise ValueError(f"Muon: adjust_lr must be one of {expected}, got {adjust_lr!r}")
        chosen = chosen_matrices(module, matrices)
        self._matrix_shards: GradientShards | None = None
        self._matrix_pieces: dict[int, list[MatrixPiece]] = {}
        super().__init__(
            module, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, groups=groups,
            zero=zero, bucket_elements=bucket_elements, excluded=[p.parameter for p in chosen],
        )  # fmt: skip
        self._matrix_options: dict[int, Options] = {}  # by group
        for number, group in enumerate((ParameterGroup("*"), *groups), start=-1):
            self._matrix_options[number] = {
                "lr": lr, "momentum": momentum, "nesterov": nesterov, "adjust_lr": adjust_lr,
                "weight_decay": group.decay(weight_decay, is_matrix=True),
            }  # fmt: skip
            self._rates.append((self._matrix_options[number], group.lr_factor))
        self._set_lr(lr)
        numbers = groups_of(module, groups)
        own = {id(p.parameter) for p in chosen}
        try:
            if zero and any(p.grid.size("data") > 1 for p in chosen):
                shards = GradientShards(chosen, bucket_elements=None, stage=zero)
                self._matrix_shards = shards
                own = {id(run.parameter) for b in shards.buckets for run in b.runs}
            self._matrix_pieces = {
                id(p.parameter): [
                    MatrixPiece.of(
                        p, self._matrix_options[numbers.get(id(p.parameter), -1)],
                        algorithm=algorithm, apart=self._matrix_shards is not None,
                    )
                ]
                if id(p.parameter) in own else []
                for p in chosen
            }  # fmt: skip
        except BaseException:
            self.close()
            raise
        if ema_decay:
            self._averages = Averages(self.pieces, ema_decay)
        self._matrices = [p.parameter for p in chosen]
        self._axis = chosen[0].grid.axis("data") if chosen else None
        self._bucket_elements, self._buckets = bucket_elements, list[Bucket]()
        if self._axis is not None and self._matrix_shards is None:
            backwards = reversed(self._matrices)
            self._buckets = list(whole_buckets_of(backwards, num_parts=self._axis.size))

    @property
    def pieces(self) -> Sequence[MasterPiece]:
        """The pieces that this rank updates: those of AdamW, then blocks of matrices."""
        return [*super().pieces, *(p for found in self._matrix_pieces.values() for p in found)]

    def pieces_of(self, parameter: nn.Parameter) -> Sequence[MasterPiece] | None:
        found = self._matrix_pieces.get(id(parameter))
        return super().pieces_of(parameter) if found is None else found

    def runs_of(self, parameter: nn.Parameter) -> tuple[tuple[int, int, int, int], ...]:
        if id(parameter) not in self._matrix_pieces:
            return super().runs_of(parameter)
        buckets = [] if self._matrix_shards is None else self._matrix_shards.buckets
        return tuple(
            (run.start, run.stop, run.at, summed.bucket.part_numel)
            for summed in buckets
            for run in summed.bucket.runs
            if run.parameter is parameter
        )

    @property
    def options(self) -> list[Options]:
        """The options for AdamW, then those of matrices, likewise by group; may be changed."""
        return [*super().options, *self._matrix_options.values()]

    def state_names(self, parameter: nn.Parameter) -> tuple[str, ...]:
        names = super().state_names(parameter)
        if id(parameter) in self._matrix_pieces:
            return (*MATRIX_STATE, *names[len(STATE_NAMES) :])
        return names

    def step(self, lr: float | None = None, *, gradient_factor: float = 1.0) -> None:
        """Applies the gradients, as AdamW does; `lr` replaces all learning rates.

        Collectives: for each matrix of this rank those of `newton_schulz.orthogonalised`, and over
        data all-gathers of updates or, with zero, of parameters. All ranks must have gradients of
        the same matrices.
        """
        if lr is not None:
            self._set_lr(lr)
        if self._shards is not None:
            self._shards.check_summed()
        if self._matrix_shards is None:
            for bucket in self._buckets:
                self._step_bucket(bucket, gradient_factor)
        else:
            self._matrix_shards.check_summed()
            self._step_owned(self._matrix_shards, gradient_factor)
            self._matrix_shards.drop_sums()
        super().step(gradient_factor=gradient_factor)

    @torch.no_grad()
    def _step_bucket(self, bucket: Bucket, factor: float) -> None:
        """Updates matrices, of which each rank of data orthogonalises one."""
        assert self._axis is not None
        own = {id(run.parameter) for run in bucket.part(self._axis.rank)}
        update: Tensor | None = None
        found: list[MatrixPiece | None] = []  # of each part; None: without a gradient
        for run in bucket.runs:
            gradient, (piece,) = run.parameter.grad, self._matrix_pieces[id(run.parameter)]
            found.append(None if gradient is None else piece)
            if gradient is not None:
                wide = piece.add(gradient, factor)
                if id(run.parameter) in own:
                    update = piece.update(wide)
        if self._axis.size > 1:
            if any(piece is not None for piece in found):
                self._apply_all(bucket, found, update)
        elif update is not None:
            piece.apply(update)

    def _apply_all(
        self, bucket: Bucket, pieces: Sequence[MatrixPiece | None], update: Tensor | None
    ) -> None:
        """Gathers the updates of all parts over data, and applies each to its piece."""
        assert self._axis is not None
        like = bucket.runs[0].parameter
        part = torch.zeros(bucket.part_numel, dtype=torch.bfloat16, device=like.device)
        if update is not None:
            part[: update.numel()].copy_(update.reshape(-1))
        updates = [torch.empty_like(p.master, dtype=part.dtype) if p else None for p in pieces]
        at_once = max(1, self._bucket_elements // self._axis.size)
        for start, slice_ in zip(range(0, len(part), at_once), part.split(at_once), strict=True):
            gathered = collectives.all_gather(slice_, self._axis).view(self._axis.size, -1)
            for own, found in zip(updates, gathered, strict=False):
                if own is not None:
                    place = own.view(-1)[start : start + at_once]
                    place.copy_(found[: len(place)])
        for piece, own in zip(pieces, updates, strict=True):
            if piece is not None and own is not None:
                piece.apply(own)

    @torch.no_grad()
    def _step_owned(self, shards: GradientShards, factor: float) -> None:
        """Updates this rank's blocks of matrices with gradients, and sends them over data."""
        returned: deque[Callable[[], None]] = deque()
        for summed in shards.buckets:
            if summed.gradient is None:
                continue
            for run in summed.runs:
                if id(run.parameter) in summed.given:
                    (piece,) = self._matrix_pieces[id(run.parameter)]
                    wide = piece.add(run.inside(summed.gradient), factor)
                    piece.apply(piece.update(wide))
            returned.append(self._sent(shards, summed))
            if len(returned) == RETURNING:
                returned.popleft()()
        while returned:
            returned.popleft()()

    @torch.no_grad()
    def _sent(self, shards: GradientShards, summed: SummedBucket) -> Callable[[], None]:
        """Starts to gather a bucket of parameters over data; the result copies them into place."""
        runs = summed.bucket.runs
        like = runs[0].parameter
        part = like.new_zeros(summed.bucket.part_numel, requires_grad=False)
        for run in summed.runs:
            (piece,) = self._matrix_pieces[id(run.parameter)]
            run.inside(part).copy_(piece.master.reshape(-1))
        pending = shards.exchange.all_gather(part, f"{summed.name} and more")

        def put() -> None:
            flat = pending()
            torch._foreach_copy_([run.of(run.parameter) for run in runs],
                                 [run.inside(flat) for run in runs])  # fmt: skip

        return put

    def zero_grad(self) -> None:
        """Drops every gradient."""
        super().zero_grad()
        for parameter in self._matrices:
            parameter.grad = None
        if self._matrix_shards is not None:
            self._matrix_shards.discard()
            self._matrix_shards.drop_sums()

    @torch.no_grad()
    def write_back(self) -> None:
        super().write_back()
        if self._matrix_shards is None:
            for (piece,) in self._matrix_pieces.values():
                piece.copy_back()
            return
        for summed in self._matrix_shards.buckets:
            self._sent(self._matrix_shards, summed)()

    def close(self) -> None:
        super().close()
        if self._matrix_shards is not None:
            self._matrix_shards.detach()
